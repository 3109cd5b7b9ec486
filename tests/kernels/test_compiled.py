"""The kernels in a train step, compiled for the generations that they are chosen for."""

import pytest

from jaxtpu.hardware import parse_slice
from jaxtpu.plan import compiler
from jaxtpu.plan.compiler import CompileRequest, compile_all, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.kernel_costs import KERNEL
from jaxtpu.plan.timing import predict_time
from tests.tiny import VOCABULARY, tiny_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.slow,
    pytest.mark.skipif(not compiler.has_compiler(), reason="libtpu is not installed"),
]
KERNELS = {
    "v2-8": "flash_",
    "v3-8": "flash_",
    "v4-8": "splash_mha",
    "v5e-8": "splash_mha",
    "v5p-8": "splash_mha",
    "v6e-8": "splash_mha",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """By slice, the compiled train step of a model of 6 query and 3 key heads, on two tensor
    parts: keys are repeated there."""
    config = tiny_config(
        model={"heads": 6, "kv_heads": 3, "head_dim": 64, "layers": 2, "remat": "full"},
        data={"batch_size": 16, "sequence_length": 120},
        precision={"compute": "bfloat16"},
        mesh={"tensor": 2},
    ).to_dict()
    requests = [CompileRequest(config, name, 7, VOCABULARY, "train", 1000) for name in KERNELS]
    directory = str(tmp_path_factory.mktemp("plans"))
    return dict(zip(KERNELS, compile_all(requests, directory=directory), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_auto_takes_a_kernel_that_compiles(name, programs):
    result = programs[name]
    assert result.fits, result.error + result.message
    module = parse_hlo(read_hlo(result))
    instructions = [i for c in module.computations.values() for i in c.instructions]
    kernels = [i.op_name for i in instructions if i.custom_call_target == KERNEL]
    assert kernels and all(KERNELS[name] in op_name for op_name in kernels)
    assert predict_time(module, parse_slice(name)).seconds["attention"] > 0
