"""How many long contexts fit an accelerator, with all KV on it and with the KV in host memory: the table of docs/devices.md.
Arithmetic from shapes and data sheets; nothing here was measured but SHARE_NEW. `.venv/bin/python tools/device_table.py`"""

from dataclasses import dataclass

GB = 10**9
KV_VALUE_BYTES = 2  # f16
WINDOW, BUDGET, SLOTS = 32 + 256 + 32, 2048, 2 * 2048  # tokens: the defaults, and the block that is being filled
SCRATCH = 1 * GB  # activations, staging
# Of a selection, what a step must fetch: 5.17 MiB of 8 x 30 layers x 32 blocks x 24 KiB (docs/performance.md, `previous`).
SHARE_NEW = 0.03


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    weights: float  # bytes, Q4_K_M

    @property
    def token_bytes(self):
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_VALUE_BYTES


@dataclass(frozen=True)
class Accelerator:
    name: str
    memory: float  # bytes
    rate: float  # bytes/s of its memory
    link: float  # bytes/s from host memory
    host: float  # bytes of host memory for KV


MODELS = [
    Model("Llama 3.1 8B", 32, 8, 128, 4.92 * GB),
    Model("Qwen3 32B", 64, 8, 128, 19.8 * GB),
    Model("Llama 3.3 70B", 80, 8, 128, 42.5 * GB),
]
ACCELERATORS = [
    Accelerator("24 GB", 24 * GB, 1008 * GB, 25 * GB, 128 * GB),
    Accelerator("80 GB", 80 * GB, 3350 * GB, 50 * GB, 1000 * GB),
    Accelerator("141 GB", 141 * GB, 4800 * GB, 50 * GB, 2000 * GB),
]
CONTEXTS = [32768, 131072]


def dense(model, accelerator, context):
    """Sequences that fit, and tokens/s of all."""
    room = accelerator.memory - model.weights - SCRATCH
    sequences = int(max(0, room) // (context * model.token_bytes))
    seconds = (model.weights + sequences * context * model.token_bytes) / accelerator.rate
    return sequences, sequences / seconds


def tiered(model, accelerator, context):
    """The same with the KV in host memory. What is near does not depend on the context; what is far must fit the host."""
    room = accelerator.memory - model.weights - SCRATCH
    near = int(max(0, room) // ((WINDOW + SLOTS) * model.token_bytes))
    sequences = min(near, int(accelerator.host // (context * model.token_bytes)))
    compute = (model.weights + sequences * (WINDOW + BUDGET) * model.token_bytes) / accelerator.rate
    link = sequences * SHARE_NEW * BUDGET * model.token_bytes / accelerator.link
    return sequences, sequences / max(compute, link)


def rows():
    yield ["model", "device", "context", "all KV on it: sequences", "tokens/s", "KV far: sequences", "tokens/s", "KV in host memory"]
    yield ["---"] * 8
    for model in MODELS:
        for accelerator in ACCELERATORS:
            if model.weights + SCRATCH > accelerator.memory:
                yield [model.name, accelerator.name, "", "weights do not fit", "", "", "", ""]
                continue
            for context in CONTEXTS:
                before, before_rate = dense(model, accelerator, context)
                after, after_rate = tiered(model, accelerator, context)
                far = after * context * model.token_bytes
                yield [
                    model.name, accelerator.name, f"{context:,}", f"{before}", f"{before_rate:,.0f}" if before else "",
                    f"{after}", f"{after_rate:,.0f}", f"{far / GB:,.0f} GB",
                ]  # fmt: skip


def table():
    return "\n".join("| " + " | ".join(row) + " |" for row in rows()) + "\n"


if __name__ == "__main__":
    print(table(), end="")
