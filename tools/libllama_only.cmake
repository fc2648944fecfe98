# llama-cpp-python forces llama.cpp's helper library on (chat parsers, HTTP client, argument parsing) although nothing
# it installs links to it. CMake includes this file right after llama.cpp's project() command, where a plain variable
# hides the forced cache entry: over fifty files fewer to compile.
set(LLAMA_BUILD_COMMON OFF)
