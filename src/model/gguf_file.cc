#include "model/gguf_file.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/hash.h"
#include "model/log_capture.h"

namespace dualdecoder {
namespace {

std::optional<std::int64_t> integer_value(const gguf_context* gguf, std::int64_t id) {
  switch (gguf_get_kv_type(gguf, id)) {
    case GGUF_TYPE_UINT8:
      return gguf_get_val_u8(gguf, id);
    case GGUF_TYPE_INT8:
      return gguf_get_val_i8(gguf, id);
    case GGUF_TYPE_UINT16:
      return gguf_get_val_u16(gguf, id);
    case GGUF_TYPE_INT16:
      return gguf_get_val_i16(gguf, id);
    case GGUF_TYPE_UINT32:
      return gguf_get_val_u32(gguf, id);
    case GGUF_TYPE_INT32:
      return gguf_get_val_i32(gguf, id);
    case GGUF_TYPE_UINT64:
      return static_cast<std::int64_t>(gguf_get_val_u64(gguf, id));
    case GGUF_TYPE_INT64:
      return gguf_get_val_i64(gguf, id);
    default:
      return std::nullopt;
  }
}

std::optional<std::uint32_t> array_element(const gguf_context* gguf, std::int64_t id, std::size_t index) {
  const gguf_type type = gguf_get_arr_type(gguf, id);
  if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY) return std::nullopt;  // have no plain data
  const void* data = gguf_get_arr_data(gguf, id);
  switch (type) {
    case GGUF_TYPE_BOOL:
      return static_cast<const std::int8_t*>(data)[index] != 0 ? 1U : 0U;
    case GGUF_TYPE_UINT32:
      return static_cast<const std::uint32_t*>(data)[index];
    case GGUF_TYPE_INT32:
      return static_cast<std::uint32_t>(static_cast<const std::int32_t*>(data)[index]);
    default:
      return std::nullopt;
  }
}

template <typename T>
Result<T> or_missing(Result<T> read, T missing) {
  if (read || read.error().code != ErrorCode::kNotFound) return read;
  return missing;
}

}  // namespace

Result<std::unique_ptr<GgufFile>> GgufFile::open(const std::string& path) {
  auto mapping = MappedFile::map(path);
  if (!mapping) return std::unexpected(mapping.error());

  std::unique_ptr<GgufFile> file(new GgufFile());
  file->path_ = path;
  file->mapping_ = std::move(*mapping);

  std::string reason;
  {
    const LogCapture log;
    file->gguf_ = gguf_init_from_file(path.c_str(), gguf_init_params{.no_alloc = true, .ctx = nullptr});
    reason = log.first_error();
  }
  if (file->gguf_ == nullptr) {
    return fail(ErrorCode::kCorrupt,
                "{} ({} bytes) is not a readable GGUF file: {}; is the download complete?", path,
                file->mapping_.bytes(), reason.empty() ? "its header is damaged" : reason);
  }
  if (Status read = file->read_tensors(); !read) return std::unexpected(read.error());
  return file;
}

GgufFile::~GgufFile() { gguf_free(gguf_); }

Status GgufFile::read_tensors() {
  const std::size_t data_offset = gguf_get_data_offset(gguf_);
  const std::size_t bytes = mapping_.bytes();
  const std::int64_t count = gguf_get_n_tensors(gguf_);
  tensors_.reserve(static_cast<std::size_t>(count));
  for (std::int64_t id = 0; id < count; ++id) {
    GgufTensor tensor;
    tensor.name = gguf_get_tensor_name(gguf_, id);
    tensor.type = gguf_get_tensor_type(gguf_, id);
    const std::int64_t* shape = gguf_get_tensor_ne(gguf_, id);
    std::copy(shape, shape + GGML_MAX_DIMS, tensor.shape.begin());
    tensor.bytes = gguf_get_tensor_size(gguf_, id);
    const std::size_t offset = gguf_get_tensor_offset(gguf_, id);
    // Compared by subtraction: no sum that could wrap.
    if (data_offset > bytes || offset > bytes - data_offset || tensor.bytes > bytes - data_offset - offset) {
      return fail(
          ErrorCode::kCorrupt,
          "{} ends too early: tensor {} needs {} bytes at offset {}, the file has {}; download it again",
          path_, tensor.name, tensor.bytes, data_offset + offset, bytes);
    }
    tensor.offset = data_offset + offset;
    tensors_.push_back(std::move(tensor));
  }
  return {};
}

Result<std::int64_t> GgufFile::find_key(const std::string& key) const {
  const std::int64_t id = gguf_find_key(gguf_, key.c_str());
  if (id < 0) return fail(ErrorCode::kNotFound, "{} has no key {}; convert the model again", path_, key);
  return id;
}

std::unexpected<Error> GgufFile::wrong_type(const std::string& key, const char* wanted) const {
  const gguf_type type = gguf_get_kv_type(gguf_, gguf_find_key(gguf_, key.c_str()));
  return fail(ErrorCode::kCorrupt, "{}: key {} is of type {}, wanted {}; convert the model again", path_, key,
              gguf_type_name(type), wanted);
}

bool GgufFile::has(const std::string& key) const { return gguf_find_key(gguf_, key.c_str()) >= 0; }

Result<std::uint32_t> GgufFile::u32(const std::string& key) const {
  const auto id = find_key(key);
  if (!id) return std::unexpected(id.error());
  const auto value = integer_value(gguf_, *id);
  if (!value) return wrong_type(key, "an integer");
  if (*value < 0 || *value > std::numeric_limits<std::uint32_t>::max()) {
    return fail(ErrorCode::kCorrupt, "{}: key {} is {}, out of range", path_, key, *value);
  }
  return static_cast<std::uint32_t>(*value);
}

Result<float> GgufFile::f32(const std::string& key) const {
  const auto id = find_key(key);
  if (!id) return std::unexpected(id.error());
  switch (gguf_get_kv_type(gguf_, *id)) {
    case GGUF_TYPE_FLOAT32:
      return gguf_get_val_f32(gguf_, *id);
    case GGUF_TYPE_FLOAT64:
      return static_cast<float>(gguf_get_val_f64(gguf_, *id));
    default:
      return wrong_type(key, "a float");
  }
}

Result<std::string> GgufFile::string(const std::string& key) const {
  const auto id = find_key(key);
  if (!id) return std::unexpected(id.error());
  if (gguf_get_kv_type(gguf_, *id) != GGUF_TYPE_STRING) return wrong_type(key, "a string");
  return std::string(gguf_get_val_str(gguf_, *id));
}

Result<std::uint32_t> GgufFile::u32_or(const std::string& key, std::uint32_t missing) const {
  return or_missing(u32(key), missing);
}

Result<float> GgufFile::f32_or(const std::string& key, float missing) const {
  return or_missing(f32(key), missing);
}

Result<std::string> GgufFile::string_or(const std::string& key, const std::string& missing) const {
  return or_missing(string(key), missing);
}

Result<std::size_t> GgufFile::array_length(const std::string& key, gguf_type element) const {
  const auto id = find_key(key);
  if (!id) return std::unexpected(id.error());
  if (gguf_get_kv_type(gguf_, *id) != GGUF_TYPE_ARRAY) return wrong_type(key, "an array");
  if (gguf_get_arr_type(gguf_, *id) != element) {
    return fail(ErrorCode::kCorrupt, "{}: key {} is an array of {}, wanted {}; convert the model again",
                path_, key, gguf_type_name(gguf_get_arr_type(gguf_, *id)), gguf_type_name(element));
  }
  return gguf_get_arr_n(gguf_, *id);
}

std::optional<std::size_t> GgufFile::first_repeated(const std::string& key) const {
  const std::int64_t id = gguf_find_key(gguf_, key.c_str());
  DD_CHECK(id >= 0 && gguf_get_kv_type(gguf_, id) == GGUF_TYPE_ARRAY &&
               gguf_get_arr_type(gguf_, id) == GGUF_TYPE_STRING,
           "{}", key);
  const auto entry = [&](std::size_t i) { return std::string_view(gguf_get_arr_str(gguf_, id, i)); };
  std::vector<std::pair<std::uint64_t, std::size_t>> hashes;  // and what entry has it
  const std::size_t count = gguf_get_arr_n(gguf_, id);
  hashes.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string_view text = entry(i);
    if (!text.empty()) hashes.emplace_back(hash_values(std::span(text)), i);
  }
  std::ranges::sort(hashes);
  std::optional<std::size_t> first;
  for (std::size_t i = 1; i < hashes.size(); ++i) {
    for (std::size_t k = i; k > 0 && hashes[k - 1].first == hashes[i].first; --k) {
      if (entry(hashes[k - 1].second) != entry(hashes[i].second)) continue;
      first = std::min(first.value_or(hashes[i].second), hashes[i].second);
      break;
    }
  }
  return first;
}

Result<std::optional<std::vector<std::uint32_t>>> GgufFile::u32_list(const std::string& key,
                                                                     std::size_t length) const {
  const std::int64_t id = gguf_find_key(gguf_, key.c_str());
  if (id < 0) return std::nullopt;
  if (gguf_get_kv_type(gguf_, id) != GGUF_TYPE_ARRAY) {
    const auto one = u32(key);
    if (!one) return std::unexpected(one.error());
    return std::vector<std::uint32_t>(length, *one);
  }
  const std::size_t count = gguf_get_arr_n(gguf_, id);
  if (count < length) {
    return fail(ErrorCode::kCorrupt, "{}: key {} has {} entries for {} layers", path_, key, count, length);
  }
  std::vector<std::uint32_t> values;
  for (std::size_t i = 0; i < length; ++i) {
    const auto value = array_element(gguf_, id, i);
    if (!value) return wrong_type(key, "an array of bool, uint32 or int32");
    values.push_back(*value);
  }
  return values;
}

const GgufTensor* GgufFile::find_tensor(const std::string& name) const {
  const std::int64_t id = gguf_find_tensor(gguf_, name.c_str());
  return id < 0 ? nullptr : &tensors_[static_cast<std::size_t>(id)];
}

}  // namespace dualdecoder
