"""The models of `exports.py`: tiny ones of transformers, by their configurations, and our own."""

import copy
import math
from dataclasses import dataclass, field
from typing import Callable

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from families import uniform

VOCABULARY = 48
BATCH, LENGTH = 2, 8


@dataclass
class Case:
    name: str
    build: Callable
    opset: int
    dynamo: bool
    # Dims of inputs that stay open: {input: {dim: name}}.
    open: dict = field(default_factory=dict)


class Call(nn.Module):
    """A model called with the inputs by their names, whose first result is taken."""

    def __init__(self, model, names, **more):
        super().__init__()
        self.model, self.names, self.more = model, names, more

    def forward(self, *inputs):
        given = dict(zip(self.names, inputs))
        if torch.jit.is_tracing() and self.names == ["input_ids"]:
            # Without a mask transformers looks for packed texts, which the older exporter cannot.
            given["attention_mask"] = torch.ones_like(inputs[0])
        found = self.model(**given, **self.more)
        return found if isinstance(found, torch.Tensor) else found[0]


def numbers(name, *dims):
    return uniform(f"input:{name}", int(np.prod(dims))).reshape(dims).astype(np.float32)


def tokens(name, *dims):
    return ((numbers(name, *dims) + 1) / 2 * VOCABULARY).astype(np.int64)


def text(masked=True):
    ids = {"input_ids": tokens("ids", BATCH, LENGTH)}
    if not masked:
        return ids
    mask = np.ones((BATCH, LENGTH), np.int64)
    mask[1, 5:] = 0
    return ids | {"attention_mask": mask}


def of(model_class, config, inputs, **more):
    """What builds a model of transformers."""
    def build():
        model = model_class(config())
        return Call(model, list(inputs), **more), inputs

    return build


def transformers_models(attention):
    t = transformers
    tiny = dict(vocab_size=VOCABULARY, attn_implementation=attention)
    llama = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **tiny,
    )
    bert = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16,
    )
    image = {"pixel_values": numbers("image", 1, 3, 16, 16)}
    sound = {"input_features": numbers("sound", 1, 8, 16)}
    once = dict(use_cache=False)
    return {
        "bert": of(t.BertModel, lambda: t.BertConfig(**bert, **tiny), text()),
        "distilbert": of(
            t.DistilBertModel,
            lambda: t.DistilBertConfig(
                dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=16, **tiny
            ),
            text(),
        ),
        "gpt2": of(
            t.GPT2LMHeadModel,
            lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **tiny),
            text(False), **once,
        ),
        "gpt2masked": of(
            t.GPT2LMHeadModel,
            lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **tiny),
            text(), **once,
        ),
        "llama": of(t.LlamaForCausalLM, lambda: t.LlamaConfig(**llama), text(), **once),
        "llamaplain": of(t.LlamaForCausalLM, lambda: t.LlamaConfig(**llama), text(False), **once),
        "mistral": of(
            t.MistralForCausalLM, lambda: t.MistralConfig(**llama, sliding_window=4),
            text(False), **once,
        ),
        "gptneox": of(
            t.GPTNeoXForCausalLM,
            lambda: t.GPTNeoXConfig(**bert, **tiny, rotary_pct=0.5),
            text(False), **once,
        ),
        "bloom": of(
            t.BloomForCausalLM,
            lambda: t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **tiny),
            text(), **once,
        ),
        "t5encoder": of(
            t.T5EncoderModel,
            lambda: t.T5Config(
                d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                feed_forward_proj="gated-gelu",
                relative_attention_num_buckets=8, relative_attention_max_distance=16, **tiny,
            ),
            text(),
        ),
        "vit": of(
            t.ViTModel,
            lambda: t.ViTConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                image_size=16, patch_size=4, attn_implementation=attention,
            ),
            image,
        ),
        "swin": of(
            t.SwinModel,
            lambda: t.SwinConfig(
                image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                window_size=4, attn_implementation=attention,
            ),
            image,
        ),
        "whisperencoder": of(
            lambda config: t.WhisperModel(config).encoder,
            lambda: t.WhisperConfig(
                vocab_size=VOCABULARY, d_model=32, encoder_layers=2, encoder_attention_heads=4,
                encoder_ffn_dim=48, decoder_layers=1, decoder_attention_heads=4,
                decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=8, pad_token_id=0,
                bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                attn_implementation=attention,
            ),
            sound,
        ),
        "resnet": of(
            t.ResNetModel,
            lambda: t.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 24], depths=[2, 1], layer_type="basic"
            ),
            image,
        ),
        "mobilenet": of(
            t.MobileNetV2Model,
            lambda: t.MobileNetV2Config(depth_multiplier=0.25, min_depth=4, image_size=16),
            image,
        ),
        "convnext": of(
            t.ConvNextModel,
            lambda: t.ConvNextConfig(hidden_sizes=[16, 24], depths=[1, 2], num_stages=2),
            image,
        ),
    }


class UNet(nn.Module):
    """Down once and up again, beside itself."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1))
        self.last = nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, image):
        beside = self.first(image)
        below = self.middle(F.max_pool2d(self.down(beside), 2))
        aligned = None if self.mode == "nearest" else False
        up = F.interpolate(below, scale_factor=4, mode=self.mode, align_corners=aligned)
        return self.last(torch.cat([up, beside], 1))


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layer = layer(16, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids))[0])


class Transformer(nn.Module):
    """The encoder and decoder that torch has, the decoder causal."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(
            32, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48,
            batch_first=True, activation="gelu",
        )

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.layers(source, target, tgt_mask=mask, tgt_is_causal=True)


class Decoder(nn.Module):
    """GPT-2 as it is written by hand, with a stored mask.

    Where it `fills`, scores that are masked are minus infinity and the activation is written out,
    as in nanoGPT; else they are the smallest number, as in transformers until version 4.40.
    """

    def __init__(self, fills, width=32, heads=4):
        super().__init__()
        self.fills, self.heads = fills, heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(16, width)
        parts = dict(
            norm1=nn.LayerNorm(width), qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width),
            norm2=nn.LayerNorm(width), up=nn.Linear(width, 48), down=nn.Linear(48, width),
        )
        self.layers = nn.ModuleList([nn.ModuleDict(copy.deepcopy(parts)) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(16, 16).tril().bool().view(1, 1, 16, 16))

    def attention(self, x, layer):
        batch, length, width = x.shape
        split = lambda t: t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        q, k, v = (split(part) for part in layer["qkv"](x).split(width, 2))
        scores = q @ k.transpose(-2, -1)
        mask = self.mask[:, :, :length, :length]
        if self.fills:
            scores = scores * (1.0 / math.sqrt(k.shape[-1]))
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores / torch.full([], v.shape[-1] ** 0.5)
            scores = torch.where(mask, scores, torch.full([], torch.finfo(scores.dtype).min))
        found = F.softmax(scores, -1) @ v
        return layer["out"](found.transpose(1, 2).contiguous().view(batch, length, width))

    def activation(self, x):
        if not self.fills:
            return F.gelu(x)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + self.attention(layer["norm1"](x), layer)
            x = x + layer["down"](self.activation(layer["up"](layer["norm2"](x))))
        return self.norm(x) @ self.tokens.weight.T


class Attention(nn.Module):
    """Attention alone: `plain`, `causal` or of a `mask` of truth values or a `bias`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, q, k, v, *more):
        mask = more[0] if more else None
        causal = self.kind == "causal"
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def own_models():
    heads = {name: numbers(name, BATCH, 4, LENGTH, 8) for name in "qkv"}
    mask = numbers("mask", BATCH, 1, LENGTH, LENGTH) > -0.3
    mask[..., 0] = True
    image = {"image": numbers("image", 1, 3, 16, 16)}
    ids = {"ids": tokens("ids", BATCH, LENGTH)}
    both = {
        "source": numbers("source", BATCH, 6, 32), "target": numbers("target", BATCH, LENGTH, 32)
    }
    bias = numbers("bias", 4, LENGTH, LENGTH)
    return {
        "unetnearest": lambda: (UNet("nearest"), image),
        "unetbilinear": lambda: (UNet("bilinear"), image),
        "lstm": lambda: (Recurrent(nn.LSTM), ids),
        "gru": lambda: (Recurrent(nn.GRU), ids),
        "transformer": lambda: (Transformer(), both),
        "decoderfilled": lambda: (Decoder(True), ids),
        "decoderwhere": lambda: (Decoder(False), ids),
        "sdpaplain": lambda: (Attention("plain"), heads),
        "sdpacausal": lambda: (Attention("causal"), heads),
        "sdpamasked": lambda: (Attention("mask"), heads | {"mask": mask}),
        "sdpabiased": lambda: (Attention("bias"), heads | {"bias": bias}),
    }


def case_list():
    """Opsets are spread so that each that the exporters write occurs."""
    eager, sdpa = transformers_models("eager"), transformers_models("sdpa")
    own = own_models()
    cases = []

    def add(name, models, exporter, opset, is_open=False):
        dynamo = exporter == "dynamo"
        kind = "-sdpa" if models is sdpa else ""
        kind += "-open" if is_open else ""
        case = Case(f"{name}{kind}-{exporter}-{opset}", models[name], opset, dynamo)
        if is_open:
            names = {0: "batch", 1: "length"}
            case.open = {input: names for input in models[name]()[1]}
        cases.append(case)

    for name, opset in dict(
        bert=11, distilbert=12, gpt2=13, gpt2masked=11, llama=14, llamaplain=15, mistral=16,
        gptneox=17, bloom=12, t5encoder=13, vit=14, swin=16, whisperencoder=17, resnet=11,
        mobilenet=12, convnext=13,
    ).items():
        add(name, eager, "legacy", opset)
    for name, opset in dict(
        bert=14, gpt2=17, llama=18, mistral=15, gptneox=16, vit=17, whisperencoder=14,
        distilbert=16,
    ).items():
        add(name, sdpa, "legacy", opset)
    for name, opset in dict(
        bert=20, gpt2=18, llama=21, t5encoder=19, bloom=18, resnet=18, mobilenet=20, convnext=21
    ).items():
        add(name, eager, "dynamo", opset)
    for name, opset in dict(
        bert=18, distilbert=19, gpt2=20, gpt2masked=18, llama=22, llamaplain=18, mistral=21,
        gptneox=20, vit=18, swin=20, whisperencoder=21,
    ).items():
        add(name, sdpa, "dynamo", opset)
    for name, opset in dict(bert=23, llama=23, vit=23).items():
        add(name, sdpa, "dynamo", opset)
    add("bert", eager, "legacy", 17, True)
    add("gpt2", sdpa, "dynamo", 18, True)
    for name, legacy, dynamo in [
        ("unetnearest", 11, 18), ("unetbilinear", 13, 20), ("lstm", 12, 18), ("gru", 14, 20),
        ("transformer", 17, 21), ("decoderfilled", 11, 19), ("decoderwhere", 13, 22),
        ("sdpaplain", 14, 23), ("sdpacausal", 15, 18),
        ("sdpamasked", 16, 20), ("sdpabiased", 14, 21),
    ]:
        add(name, own, "legacy", legacy)
        add(name, own, "dynamo", dynamo)
    return cases
