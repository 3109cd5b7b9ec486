import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtpu.data.tokenizer import ByteTokenizer
from jaxtpu.data.tokens import TokenStream


def stream_of(documents: list[bytes]) -> TokenStream:
    """A stream held in memory."""
    tokenizer = ByteTokenizer()
    tokens = np.concatenate([[tokenizer.document_start, *text] for text in documents])
    return TokenStream(
        tokens.astype(np.uint16), 256, len(documents), sum(map(len, documents)), tokenizer.name
    )


@pytest.fixture
def make_stream():
    return stream_of


@pytest.fixture
def stream():
    """Ninety documents of 1 to 60 random bytes."""
    random = np.random.default_rng(0)
    return stream_of([random.bytes(random.integers(1, 61)) for _ in range(90)])


@pytest.fixture
def sharding():
    """Rows of a batch over all devices."""
    return NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
