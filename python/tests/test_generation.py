"""Models of transformers that generate, with caches of every kind: as with their eager attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from test_transformers import made  # noqa: E402

import counterpoint.transformers as hook  # noqa: E402

hook.register()
NAMES = ["llama", "mistral", "gemma2", "gpt_oss"]
TOKENS = torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(1))
PADDING = torch.ones_like(TOKENS)
PADDING[0, :4] = 0
PADDING[1, :1] = 0


def both(name: str) -> list[Any]:
    """The model with either attention."""
    models = []
    for attention in ("eager", "counterpoint"):
        model = made(name).eval()
        model.set_attn_implementation(attention)
        models.append(model)
    return models


def in_pieces(model: Any, cache: Any, padding: torch.Tensor | None) -> torch.Tensor:
    """Logits of tokens that come in pieces, of those that are no padding."""
    found = []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 10), (10, 11)):
            mask = None if padding is None else padding[:, :last]
            made = model(TOKENS[:, first:last], attention_mask=mask, past_key_values=cache, use_cache=True).logits
            found.append(made.flatten(0, 1) if padding is None else made[padding[:, first:last].bool()])
    return torch.cat(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [None, PADDING])
def test_tokens_in_pieces_into_caches(name: str, padding: torch.Tensor | None) -> None:
    """A static cache counts in a tensor, which a layer changes before its mask is made."""
    eager, ours = both(name)
    for make in (
        lambda config: transformers.DynamicCache(config=config),
        lambda config: transformers.StaticCache(config=config, max_cache_len=16),
    ):
        torch.testing.assert_close(
            in_pieces(ours, make(ours.config), padding), in_pieces(eager, make(eager.config), padding), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", NAMES)
def test_generating_is_as_eager(name: str) -> None:
    eager, ours = both(name)
    for how in (
        {"cache_implementation": "static", "attention_mask": PADDING},
        {"cache_implementation": "static"},
        {"use_cache": False, "attention_mask": PADDING},
        {"num_beams": 2, "attention_mask": PADDING},
        {"prompt_lookup_num_tokens": 3},
    ):
        tokens = TOKENS[:1] if "prompt_lookup_num_tokens" in how else TOKENS
        expected, found = (m.generate(tokens, **how, max_new_tokens=7, do_sample=False, pad_token_id=0) for m in (eager, ours))
        assert torch.equal(found, expected), how


@pytest.mark.parametrize("name", ["Bloom", "CodeGen"])
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    """They would run without any mask."""
    config = getattr(transformers, f"{name}Config")(vocab_size=61, n_embd=16, n_layer=1, n_head=4, rotary_dim=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="counterpoint")
    for padding in (None, PADDING):
        with pytest.raises(NotImplementedError, match=f"models of {name}Config compute attention by themselves"):
            model(TOKENS, attention_mask=padding)
