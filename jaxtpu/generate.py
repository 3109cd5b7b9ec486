"""Sampling text from a trained model, by a full forward pass for each token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.config import Config
from jaxtpu.config.vision import VISION_MODELS
from jaxtpu.data.tokenizer import Tokenizer
from jaxtpu.errors import ConfigError
from jaxtpu.setup import set_up
from jaxtpu.train.programs import Programs


def make_sampler(programs: Programs, length: int):
    """The jitted (params, tokens_T, start, stop, temperature, key) -> tokens_T.

    Tokens `start` to `stop - 1` are sampled one by one; temperature 0 takes the likeliest.

    Args:
      length: T, the tokens that the model sees.
    """

    def sample(params, tokens_T, start, stop, temperature, key):
        positions_BT = jnp.arange(length, dtype=jnp.int32)[None]

        def next_token(at, tokens_T):
            batch = {
                "inputs": tokens_T[None],
                "segment_ids": jnp.ones_like(positions_BT),
                "positions": positions_BT,
            }
            with programs.rules.active():
                logits_V = programs.model.apply(params, batch)[0, at - 1]
            noise_V = jax.random.gumbel(jax.random.fold_in(key, at), logits_V.shape)
            token = jnp.argmax(logits_V + temperature * noise_V)
            return tokens_T.at[at].set(token.astype(jnp.int32))

        return jax.lax.fori_loop(start, stop, next_token, tokens_T)

    return jax.jit(sample)


def generate(
    programs: Programs,
    params: Any,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    max_tokens: int,
    length: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """The prompt with what the model makes of it, up to the end of the document.

    Args:
      prompt: may be empty.
      max_tokens: tokens to add; fewer where the document ends, or where `length` is full.
      length: tokens that the model was trained on.

    Raises:
      ConfigError: the prompt fills `length` already, or a number is out of range.
    """
    if max_tokens < 1:
        raise ConfigError("--tokens", max_tokens, "must be at least 1.", "Use 200.")
    if not 0 <= seed < 2**31:
        raise ConfigError("--seed", seed, "must be from 0 to 2147483647.", "Use 0.")
    if not temperature >= 0:
        raise ConfigError("--temperature", temperature, "must not be negative.", "Use 0.7.")
    try:
        # A locale other than UTF-8 hands over the bytes of the command line as surrogates.
        prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise ConfigError("--prompt", prompt, "is not UTF-8.", "Use text in UTF-8.") from None
    ids = [tokenizer.document_start, *tokenizer.encode(prompt).tolist()]
    if len(ids) >= length:
        raise ConfigError(
            "--prompt", prompt, f"has {len(ids)} tokens; the model sees {length}.",
            f"Use at most {length - 1} tokens.",
        )  # fmt: skip
    tokens_T = np.zeros(length, np.int32)
    tokens_T[: len(ids)] = ids
    stop = min(length, len(ids) + max_tokens)
    sampler = make_sampler(programs, length)
    sampled = np.asarray(
        sampler(params, tokens_T, len(ids), stop, temperature, jax.random.key(seed))
    )[len(ids) : stop]
    ends = np.flatnonzero(sampled == tokenizer.document_start)
    return prompt + tokenizer.decode(sampled[: ends[0]] if ends.size else sampled)


def generate_from(config: Config, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Text from the latest checkpoint of the run in `config.workdir`.

    Raises:
      ConfigError: there is no checkpoint, or an argument is out of range.
    """
    if config.model.name in VISION_MODELS:
        raise ConfigError(
            "--workdir", config.workdir, f"holds a model of images, {config.model.name}.",
            "Name the folder of a model of text.",
        )  # fmt: skip
    setup = set_up(config)
    checkpoints = Checkpoints(config.workdir, config.checkpoint)
    try:
        step = checkpoints.newest_whole(set_aside=False)
        if step is None:
            raise ConfigError(
                "--workdir", config.workdir, "holds no checkpoint.", "Train first, then generate."
            )
        params = checkpoints.restore_params(setup.programs.abstract_state.params, step)
    finally:
        checkpoints.close()
    return generate(
        setup.programs,
        params,
        setup.tokenizer,
        prompt=prompt,
        max_tokens=tokens,
        length=config.data.sequence_length,
        temperature=temperature,
        seed=seed,
    )
