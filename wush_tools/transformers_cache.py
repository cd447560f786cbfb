"""Transformers: calibration of its models, and WushCache, its Cache of the window caches of wush_kv.py.

With attention "wush", `update` only marks the new keys: the model hands them on, and `wush_attention` finds
the cache's layer by the mark. With any other, `update` returns all keys and values, dequantized.
"""
import copy
import warnings
from contextlib import contextmanager
from functools import cached_property
from typing import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wush_kv import (BITS, FOLDS, REFINEMENTS, TRANSFORMS, Scheme, WindowCache, add_moments, apply,
                     block_size, derive, inverse_transpose, join_moments, known_parts, padding_mask,
                     refined_codec, zero_moments)
from wush_tools.checkpoints import check_head_dim, digest, head_dim, refuse_if


def decoder_config(config):
    """Return the decoder's own config. Raises ValueError for one that a window cache would serve wrongly."""
    c = config.get_text_config(decoder=True)
    odd = {*(getattr(c, "layer_types", None) or [])} - {"full_attention"}
    odd = odd or {type(x).__name__ for x in DynamicCache(config=c).layers} - {DynamicLayer.__name__}
    refuse_if(odd, f"only layers of full attention are supported, not {', '.join(sorted(odd))}")
    check_head_dim(head_dim(c))
    return c

def attention_modules(model, *parts: str) -> list:
    """List a model's attention modules. Raises ValueError if they lack one of `parts` by this name."""
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and all(hasattr(m, x) for x in parts)]
    layers = decoder_config(model.config).num_hidden_layers
    refuse_if([m.layer_idx for m in modules] != [*range(layers)],
              f"{len(modules)} of the model's {layers} layers have an attention with {' and '.join(parts)}")
    return modules

def register_attention(name: str, function: Callable) -> None:
    """Let model.set_attn_implementation(name) choose `function`; its masks are those of "sdpa"."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)

def grouped(query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    """Group queries (b, h, t, d) by KV head, (b, g, r, t, d), scaled so that d^(-1/2) remains to be done."""
    factor = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
    return (query if abs(factor - 1) < 1e-6 else query * factor).unflatten(1, (key.shape[1], -1))

@torch.no_grad()
def calibrate(model, tokenizer, text: str | list[str], *, length: int = 1024, sequences: int = 16,
              transform: str = "wush", refine=tuple(REFINEMENTS), group: int | None = None) -> dict:
    """Derive transforms for a transformers model from `sequences` times `length` tokens of text, or fewer.

    As `collect_moments` and `derive` do; `refine` is for wush and wush_a only. The model stays as it was.
    Raises ValueError for a model that WushCache cannot serve or whose values are folded, and without text.
    """
    modules, texts = attention_modules(model, "o_proj"), [text] if isinstance(text, str) else text
    parts = known_parts(refine) if transform in ("wush", "wush_a") else []
    refuse_if(transform not in TRANSFORMS, f"transform {transform!r} is not in {', '.join(TRANSFORMS)}")
    refuse_if(hasattr(decoder_config(model.config), "wush_folded"), "the model's values are folded")
    ids = [i for part in texts for i in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
    ids, totals = ids[:sequences * length], [{} for _ in modules]
    refuse_if(not ids, "there is no text to calibrate on")

    def observe(module, query, key, value, mask, scaling=None, **how):
        q, total = grouped(query, key, scaling), totals[module.layer_idx]
        if not total:            # W_O as what o_proj does to I: with LoRA, quantized or offloaded weights too
            I = torch.eye(q.shape[1:3].numel() * q.shape[-1], dtype=q.dtype, device=q.device)
            W_O = module.o_proj(I) - module.o_proj(0 * I[:1])
            total |= zero_moments(W_O.unflatten(0, (*q.shape[1:3], -1)), transform == "wush_a")
        add_moments(total, q, key, value)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **how)

    register_attention("wush_calibrate", observe)
    before, modes = model.config._attn_implementation, {m: m.training for m in model.modules()}
    try:
        model.eval().set_attn_implementation("wush_calibrate")
        for part in tqdm(torch.tensor(ids).split(length), "calibrate", disable=None):
            model.base_model(part[None].to(model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for m, mode in modes.items():
            m.training = mode
    refuse_if(not all(totals), "the model's attention does not use transformers' AttentionInterface")
    moments = join_moments([{name: x.cpu() for name, x in total.items()} for total in totals])
    return derive(moments, transform, group, parts)

@contextmanager
def folded_values(model, T_V: Tensor):
    """Fold T_V (l, g, n, m, m) into a model for a while; its config is marked, for WushCache to see.

    Raises ValueError for a model that is folded already, or of other heads, or without plain weights.
    """
    modules, config = attention_modules(model, "v_proj", "o_proj"), decoder_config(model.config)
    refuse_if(hasattr(config, "wush_folded"), "this model's values are folded already")
    folds = [(p, name, T) for m, T in zip(modules, T_V) for name, p in m.named_parameters()
             if name.startswith(("v_proj", "o_proj")) and name != "o_proj.bias"]
    plain = all(name in FOLDS and p.is_floating_point() and not p.is_meta for p, name, _ in folds)
    refuse_if(not plain, "values fold into plain weights, not into quantized or offloaded ones, nor LoRA's")
    refuse_if(T_V.shape[:4].numel() != sum(len(m.v_proj.weight) for m in modules), "T_V is of another shape")
    before = [p.data for p, *_ in folds]
    try:
        for p, name, T in folds:
            p.data = FOLDS[name](T.to(p.device), p.data)
        config.wush_folded = [digest(T) for T in T_V]
        yield model
    finally:
        for (p, *_), data in zip(folds, before):
            p.data = data
        vars(config).pop("wush_folded", None)

def shard_transforms(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Take the KV heads of one rank of a tensor-parallel model; where ranks exceed heads, they share them.

    Raises ValueError if neither number divides the other.
    """
    heads = tensors["k"].shape[1]
    refuse_if(not 0 <= rank < world_size, f"rank {rank} is not one of {world_size}")
    refuse_if(heads % world_size and world_size % heads, f"{heads} KV heads do not go to {world_size} ranks")
    first, count = rank * heads // world_size, max(heads // world_size, 1)
    return {key: t[:, first:first + count].contiguous() for key, t in tensors.items()}

def left_padding(mask: Tensor, batch: int, length: int) -> list[int]:
    """Read each row's left padding from the mask (b, 1, t, length) of the last t tokens.

    Raises ValueError for one that shows a query anything but all columns from the padding up to its own.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    known = mask.dtype == torch.bool or (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    wrong = f"attention 'wush' serves causal masks with padding at the left only, of {length} columns"
    refuse_if(not known or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != length, wrong)
    seen, t = seen.expand(batch, -1, -1, -1), mask.shape[2]
    pad = (length - seen[:, 0, -1].sum(-1)).tolist()
    own = torch.arange(length - t, length, device=mask.device)[:, None]      # each query's column
    padding = own < torch.tensor(pad, device=mask.device)[:, None, None, None]
    refuse_if(not ((seen == padding_mask(pad, t, length, mask.device)) | padding).all(), wrong)
    return pad

def wush_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **how) -> tuple:
    """Attend through the window cache whose `update` these keys come from; without one, as "sdpa" does."""
    if (layer := getattr(key, "wush_layer", None)) is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **how)
    refuse_if(not layer.waiting, "attention 'wush' was given the keys of another layer")
    layer.waiting = False        # a refusal leaves the cache fit for the next call
    odd = [x for x in ("softcap", "s_aux", "sliding_window", "position_bias") if how.get(x) is not None]
    odd += ["dropout"] * (dropout > 0) + ["is_causal=False"] * (how.get("is_causal") is False)
    refuse_if(odd, f"attention 'wush' knows no {' and no '.join(odd)}")
    o = layer.attend(grouped(query, key, scaling), key, value, mask)
    return o.flatten(1, 2).transpose(1, 2).contiguous(), None

register_attention("wush", wush_attention)           # may be chosen before a WushCache is made

def without_gradient(x: Tensor, like: Tensor) -> Tensor:
    """Detach x; if `like` wants gradients, a backward pass through x raises instead of leaving them out."""
    x = x.detach()
    if like.requires_grad:
        x.requires_grad_().register_hook(lambda _: refuse_if(True, "WushCache passes no gradients on"))
    return x

class WushLayer:
    """A layer of WushCache: a WindowCache of k and T_V v, made where the first keys are.

    `length` counts padding, as transformers does; the windows hold none of it if "wush" attended.
    """
    is_compileable = is_sliding = False
    is_croppable = supports_early_init = True

    def __init__(self, config, l: int, scheme: Scheme, windows: tuple):
        self.config, self.l, self.scheme, self.windows = config, l, scheme, windows
        self.reset()

    @cached_property
    def T_V_digest(self) -> str:
        return digest(self.scheme.tensors["v"][self.l])

    def __deepcopy__(self, memo: dict):
        """Copy the tokens, share the rest: the transforms, and the model's config, which may yet change."""
        new = copy.copy(self)
        new.window = copy.deepcopy(self.window, memo)
        return new

    def reset(self) -> None:
        self.window, self.length, self.waiting, self.is_folded = None, 0, False, False

    @property
    def is_initialized(self) -> bool:
        return self.window is not None

    def lazy_initialization(self, k: Tensor, v: Tensor | None = None) -> None:
        """Make the window cache, or take it along to the device of k."""
        if self.window is not None and self.window.recent[0].device == k.device:
            return
        state = self.window and self.window.state()
        keys, values = (self.scheme.of(side, self.l, k.device) for side in "kv")
        refuse_if(k.shape[1::2] != (len(keys.T), keys.T.shape[1] * keys.T.shape[2]),
                  f"keys are {k.shape[1]} heads of {k.shape[3]} here, the transforms {tuple(keys.T.shape)}")
        self.T_V, self.T_V_inverse = values.T, inverse_transpose(values.T).mT
        self.window = WindowCache(len(k), k.shape[1], k.shape[3], keys, values, *self.windows, k.dtype,
                                  k.device)
        if state:
            self.window.restore(state)

    @torch.inference_mode(False)             # what is begun in inference mode may go on outside of it
    @torch.no_grad()
    def update(self, k: Tensor, v: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in a call's keys and values (b, g, t, d): hand them to "wush", or return all cached ones."""
        self.lazy_initialization(k)
        refuse_if(self.waiting, "the last call's keys never came to attention 'wush': is the cache's config "
                                "the model's?")
        refuse_if(len(k) != len(self.window.n), f"a batch of {len(k)} meets a cache of {len(self.window.n)}")
        folded = getattr(self.config, "wush_folded", None)       # by `folded_values`, layer by layer
        refuse_if(folded and folded[self.l] != self.T_V_digest, "the model has another T_V folded in")
        self.is_folded = bool(folded)
        if self.config._attn_implementation == "wush":
            marked, self.waiting = k.view_as(k), True            # the caller's own tensor stays as it is
            marked.wush_layer = self
            return marked, v
        if self.l == 0 and self.length == 0:
            warnings.warn("WushCache dequantizes all tokens at every step; to read the packed ones instead: "
                          "model.set_attn_implementation('wush')", stacklevel=4)
        self.length += k.shape[2]
        self.window.append(k, self.transformed(v, self.T_V), [0] * len(k))
        cached = self.keys, self.values
        self.window.flush()
        return tuple(without_gradient(x, k) for x in cached)

    @property
    def keys(self) -> Tensor:
        """All cached keys (b, g, s, d), dequantized; padding that was left out is zero."""
        return self.window.read(0, self.length)

    @property
    def values(self) -> Tensor:
        return self.transformed(self.window.read(1, self.length), self.T_V_inverse)

    def transformed(self, v: Tensor, T: Tensor) -> Tensor:
        return v if self.is_folded else apply(T, v).to(v.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend as WindowCache does, by the padding that the mask shows, which must not change."""
        before = self.length
        if mask is not None and (self.l == 0 or not hasattr(mask, "wush_pad")):      # once for all layers
            mask.wush_pad = left_padding(mask, len(k), before + k.shape[2])
        pad = [0] * len(k) if mask is None else mask.wush_pad
        refuse_if([min(p, before) for p in pad] != [before - n for n in self.window.n],
                  "the mask hides other columns than were padding when they were cached")
        self.length += k.shape[2]
        o = self.window.attend(q, k, self.transformed(v, self.T_V), [max(p - before, 0) for p in pad])
        return without_gradient(self.transformed(o, self.T_V_inverse), q)

    def get_seq_length(self, *args) -> int:
        return self.length

    def get_mask_sizes(self, query) -> tuple[int, int]:
        """Return (length with the new tokens, 0); transformers 5.0 gives the tokens' positions."""
        return self.length + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens: int) -> None:
        """Drop the last −tokens tokens; a positive number is the length to keep, as in transformers 5.0."""
        count = min(-tokens, self.length) if tokens <= 0 else max(self.length - tokens, 0)
        if self.window is not None:
            self.window.crop(count)
        self.length -= count

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.window is not None:
            self.window.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.window is not None:
            self.window.select(torch.arange(len(self.window.n)).repeat_interleave(repeats))

CacheLayerMixin.register(WushLayer)

class WushCache(Cache):
    """A transformers Cache in few bits: WushCache(model.config, transforms, bits=2).

    `transforms` come from `calibrate` or `load_transforms`; `refine` says which REFINEMENTS they were made
    with, by default all if they hold feedback, else none. The windows are WindowCache's, `group` is Codec's,
    16 bits is off. Raises ValueError for what it cannot serve.
    """

    def __init__(self, config, transforms: dict[str, Tensor], bits: int = 2, k_bits: int | None = None,
                 v_bits: int | None = None, sink: int = 16, keep: int = 128, flush: int = 16,
                 group: int | None = None, refine: Iterable[str] | None = None):
        c, widths = decoder_config(config), (k_bits or bits, v_bits or bits)
        refuse_if(not {"k", "v"} <= {*transforms}, "the transforms lack those of the keys or of the values")
        refuse_if(not {*widths} <= {*BITS}, f"{widths} bits: they are in {BITS}")
        refuse_if(any(len(t) != c.num_hidden_layers for t in transforms.values()),
                  f"the transforms are of {len(transforms['k'])} layers, the model has {c.num_hidden_layers}")
        if refine is None:
            refine = "all" if "k_feedback" in transforms else "off"
        refine = known_parts(refine)
        group = group or block_size(transforms)
        self.how = dict(transforms=transforms, k_bits=widths[0], v_bits=widths[1], sink=sink, keep=keep,
                        flush=flush, group=group, refine=refine)
        scheme = Scheme(*[refined_codec(b, refine, group) for b in widths], transforms)
        windows = sink, keep, flush
        super().__init__(layers=[WushLayer(c, l, scheme, windows) for l in range(c.num_hidden_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage held, spare capacity included."""
        return sum(layer.window.nbytes for layer in self.layers if layer.window is not None)

    def save(self, path: str) -> None:
        """Write everything, transforms too: WushCache.load(path, config) goes on with the same tokens."""
        states = [(layer.length, layer.window and layer.window.state()) for layer in self.layers]
        torch.save({"how": self.how, "layers": states}, path)

    @classmethod
    def load(cls, path: str, config):
        saved = torch.load(path, weights_only=True, map_location="cpu")
        cache = cls(config, **saved["how"])
        for layer, (length, state) in zip(cache.layers, saved["layers"]):
            layer.length = length
            if state:
                layer.lazy_initialization(state["recent"][0])
                layer.window.restore(state)
        return cache
