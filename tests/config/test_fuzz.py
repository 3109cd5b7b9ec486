"""Whatever is typed, the answer is a configuration or a `ConfigError`, and no other exception."""

import json
import math
import random

import pytest

from jaxtpu.config import Config, finalize, leaves, load, run_units, split_arguments
from jaxtpu.errors import ConfigError
from tests.config import TINY

VALID = {name: str(value) for name, value in leaves(load(TINY))}
# Right for some field, odd for most.
TEXTS = (
    """0|1|2|3|4|5|7|8|16|-1|-2|1.5|1e3|1e400|-1e400|nan|inf|1e30|99999999999999999999|0x10|1_0|
007|None|none|True|false|[]|[1]|()|('a','b')|{}|{'a': 1}|{[]: 1}|{1, 2}|...|b'x'|1+2j|lambda: 0|a|
a,b|,|,,| |''|'5'|"|'|\\|\\d|'\\d'|#|%|5%|200%|-5%|5 %|%5|1 epoch|2 epochs|1e999 epochs|3 parsecs|
10B|10B tokens|1k examples|5 5|1.2.3|.|-|--|=|a=b|a:b|../x|~|fsdp|data,fsdp|fsdp,fsdp|fdsp|tensor|
data fsdp|adamw|adam|cosine|wsd|cross_entropy|accuracy|accuracy,accuracy|bfloat16|float16|full|
transformer|python_corpus|tfds:x|bytes|.*/scale|[|(?P<|é|\U0001f600|\udcff|1if|0_|1__0""".replace(
        "\n", ""
    ).split("|")
    + ["", "x" * 200, "[" * 300, "9" * 5000, "a\nb", "\t3", "3\n"]
)


def misspelled(name: str, chance: random.Random) -> str:
    at = chance.randrange(len(name))
    changes = [
        name[:at] + name[at + 1 :],
        name[:at] + chance.choice("abc._- :%") + name[at:],
        name[:at] + name[at:].upper(),
        name[:at],
        name.rpartition(".")[2],
        f"{name}.{name}",
        f".{name}",
    ]
    return chance.choice(changes)


def command_line(chance: random.Random) -> list[str]:
    """One to three fields, most of them with a value that is valid, the others with anything."""
    words = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(list(VALID))
        text = chance.choice((VALID[name], VALID[name], chance.choice(TEXTS)))
        if chance.random() < 0.1:
            name = misspelled(name, chance)
        no = "no" if chance.random() < 0.03 else ""
        option = f"{chance.choice(('--', '--', '-'))}{no}config.{name}"
        words += chance.choice(([f"{option}={text}"], [f"{option}={text}"], [option, text]))
        if chance.random() < 0.03:
            words.pop()
    return words


@pytest.mark.parametrize("seed", range(5))
def test_only_a_config_or_a_config_error(seed):
    chance = random.Random(seed)
    accepted = refused = 0
    for _ in range(80):
        words, devices = command_line(chance), chance.choice((8, 8, 8, 1, 6, 256))
        try:
            _, overrides, _ = split_arguments(words)
            config = load(TINY, overrides)
            sizes = finalize(config, devices, 257)
            units = run_units(config, chance.choice((1, 1000, 10**9)))
        except ConfigError as error:
            refused += 1
            assert error.problem and str(error).startswith(f"{error.field}="), words
            assert "\n" not in str(error), words
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} from {words}") from error
        else:
            accepted += 1
            assert math.prod(sizes.values()) == devices, words
            assert units.steps > 0, words
            again = Config()
            again.update(json.loads(json.dumps(config.to_dict())))
            assert again == config, words
    assert accepted >= 8 and refused >= 20  # both outcomes are tried
