"""Models of Hugging Face transformers, of tiny configurations: nothing is downloaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers as hf
from torch import nn

from library_models.model import CLASSES, Model, ids, image, image_map

__all__ = ["MODELS"]

WORDS = 31
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CAUSAL = {**_SIZES, "num_key_value_heads": 1, "use_cache": False}


def _text(
    model: str, config: str, *, each: bool = True, decoder: bool = False, **sizes: Any
) -> Model:
    def make() -> nn.Module:
        told = {**sizes} if each else {**sizes, "num_labels": CLASSES}
        return getattr(hf, model)(getattr(hf, config)(**told))

    return ids(make, WORDS, each=each, decoder=decoder)


def _coarse(model: Model) -> Model:
    """A model with norms in float32, in stages too: there the gradients that they round are divided by the
    denominator of the loss at the end of a step, not at its begin.
    """
    return dataclasses.replace(model, rounds=1e-6)


def _image(model: str, config: str, **sizes: Any) -> Model:
    def make() -> nn.Module:
        return getattr(hf, model)(getattr(hf, config)(num_labels=CLASSES, **sizes))

    return image(make, 32, 32, plain=False, name="pixel_values")


def _segformer() -> nn.Module:
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=CLASSES,
    )
    return hf.SegformerForSemanticSegmentation(config)


MODELS: dict[str, Model] = {
    "albert": _text(
        "AlbertForSequenceClassification", "AlbertConfig", each=False, **_SIZES, embedding_size=12
    ),
    "bert": _text(
        "BertForSequenceClassification",
        "BertConfig",
        each=False,
        **_SIZES,
        attn_implementation="eager",
    ),
    "convnext": _image(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
    ),
    "distilbert": _text(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        each=False,
        vocab_size=WORDS,
        dim=24,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=32,
        attention_dropout=0.0,
    ),
    "gemma": _coarse(_text("GemmaForCausalLM", "GemmaConfig", **_CAUSAL, head_dim=12)),
    "gpt2": _text(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=WORDS,
        n_embd=24,
        n_layer=3,
        n_head=2,
        n_positions=32,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES, use_cache=False),
    "llama": _coarse(_text("LlamaForCausalLM", "LlamaConfig", **_CAUSAL)),
    "mistral": _coarse(_text("MistralForCausalLM", "MistralConfig", **_CAUSAL, head_dim=12)),
    "opt": _text(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=WORDS,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=32,
        word_embed_proj_dim=24,
        use_cache=False,
    ),
    "qwen2": _coarse(_text("Qwen2ForCausalLM", "Qwen2Config", **_CAUSAL)),
    "roberta": _text(
        "RobertaForMaskedLM", "RobertaConfig", **_SIZES, attention_probs_dropout_prob=0.0
    ),
    "segformer": image_map(_segformer, 64, 64, plain=False, name="pixel_values", scale=4),
    "swin": _image(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 3],
        window_size=4,
    ),
    "t5": _text(
        "T5ForConditionalGeneration",
        "T5Config",
        decoder=True,
        vocab_size=WORDS,
        d_model=24,
        d_kv=12,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    ),
    "vit": _image(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=32,
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    ),
}
