"""What each rematerialisation costs: the train step of configs/lm_1b.py, compiled for a v3-8.

    python -m tests.benchmarks.remat

Four sequences a core, fsdp 8; bytes and cycles are the TPU compiler's, the time is predicted from
its schedule. About a minute a row, but what was compiled before is kept.
"""

from jaxtpu import environment
from jaxtpu.config import load
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.timing import predict_time

_CONFIG, _SLICE = "configs/lm_1b.py", "v3-8"
_HBM_GIB = 15.48  # the compiler's own limit: rows above 8 GiB are shown too
_BYTE_IDS = 257  # of the tokenizer
ROWS = (
    ("full", ""),
    ("save_attention_out", ""),
    ("save_qkv", ""),
    ("save_attention", ""),
    ("save_attention_out", "mlp_gate=save"),
    ("save_attention_out", "mlp_gate=offload"),
    ("dots", ""),
    ("none", ""),
)


def request(remat: str, tensors: str) -> CompileRequest:
    """The train step with `model.remat` and `model.remat_tensors`."""
    fields = [("model.remat", remat), ("model.remat_tensors", tensors), ("mesh.fsdp", "8")]
    return CompileRequest(load(_CONFIG, fields).to_dict(), _SLICE, _HBM_GIB, _BYTE_IDS)


def line(result: CompileResult) -> str:
    """HBM of a device, GiB; cycles, millions; seconds of a step."""
    if not result.fits:
        needed = f"{result.needed_bytes / 2**30:.1f} GiB" if result.needed_bytes else result.error
        return f"does not fit: {needed}"
    time = predict_time(parse_hlo(read_hlo(result)), parse_slice(_SLICE))
    return f"{result.hbm_bytes / 2**30:7.2f} {time.cycles / 1e6:9.0f} {time.step_seconds:7.3f}"


def main() -> None:
    environment.prepare(1, platform="cpu")
    print(f"{'HBM GiB':>7} {'M cycles':>9} {'step s':>7}  model.remat, remat_tensors")
    for row, result in zip(ROWS, compile_all([request(*row) for row in ROWS]), strict=True):
        print(f"{line(result)}  {', '.join(filter(None, row))}", flush=True)


if __name__ == "__main__":
    main()
