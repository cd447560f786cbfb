"""Transformers: calibrating its models, folding values into them, and WushCache, its Cache made of window caches.

A model runs a WushCache with any attention. With this file's own, `model.set_attn_implementation("wush")`, a step reads
the packed tokens as they lie; with any other, all tokens are dequantized at every step. Transformers hands keys k and
values v to the cache's `update` first, and then the attention with what `update` returned. For "wush" this is a
placeholder for the keys, *marked* with the layer of the cache, which keeps k and v until the queries q are there too:

    "wush"      update(k, v) keeps them, returns marked keys;   attention(q, marked keys) has the layer store and attend
    another     update(k, v) stores them, returns all keys and values, dequantized;   attention(q, these) is another's

What the windows hold are keys as they come, and values transformed by T_V; packed keys are transformed by T_K as they
are encoded. `folded_values` makes the model's values come out transformed; without it the layer transforms them itself,
and the outputs back.
"""
import copy
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from wush_kv import (
    FOLDS,
    PAPER,
    REFINED,
    TRANSFORMS,
    Basis,
    LayerMoments,
    Refine,
    Transforms,
    WindowCache,
    Windows,
    apply,
    as_windows,
    bits_of_sides,
    derive,
    inverse_transpose,
    is_average,
    scheme_of,
    stack_moments,
)
from wush_tools.checkpoints import (
    check_head_dim, check_layout, digest, explained, head_dim, write_whole)


# ----------------------------------------------------------------------------------------------------------------
# Models
#
# Transformers knows several hundred architectures. A window cache serves those whose layers all attend to all
# earlier tokens and whose queries, keys, values and outputs have one head dim. The others are refused: most by their
# config, before anything is computed.

def kv_heads(config):
    """Return the number of KV heads; some configs leave it out."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads

def decoder_config(config):
    """Return the decoder's own config. Raises ValueError for one that a window cache would serve wrongly."""
    if not isinstance(config, PretrainedConfig):
        kind = type(config).__name__
        raise ValueError(f"a {kind} is not a config of transformers: give model.config")
    config = config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or []
    kinds = set(layer_types) - {"full_attention"}
    if not kinds:
        # Either all are listed as full ones, or none is listed. Which cache would transformers make for them?
        own_layers = DynamicCache(config=config).layers
        kinds = {type(layer).__name__ for layer in own_layers} - {DynamicLayer.__name__}
    if kinds:
        names = ", ".join(sorted(kinds))
        raise ValueError(f"only layers of full attention are supported, not {names}")

    # Latent attention (MLA) caches something else than keys and values.
    d = head_dim(config)
    is_latent = getattr(config, "kv_lora_rank", None) or getattr(config, "qk_nope_head_dim", None)
    if is_latent or getattr(config, "v_head_dim", None) not in (None, d):
        raise ValueError(
            "latent attention is not supported: queries, keys and values must share one head dim")
    if type(kv_heads(config)) is not int:        # but a list, of a number for each layer
        raise ValueError("all layers must have the same number of KV heads")
    check_head_dim(d)
    return config

def attention_modules(model, *projections):
    """List a model's attention modules, by layer. Raises ValueError if they lack one of the named projections."""
    config = decoder_config(model.config)
    modules = []
    for module in model.modules():
        if hasattr(module, "layer_idx") and all(hasattr(module, name) for name in projections):
            modules.append(module)
    n_layers = config.num_hidden_layers
    if [module.layer_idx for module in modules] != list(range(n_layers)):
        raise ValueError(
            f"{len(modules)} of the model's {n_layers} layers have an attention with "
            f"{' and '.join(projections)}")

    d = head_dim(config)
    for module in modules:
        check_width(module, "v_proj", "out_features", kv_heads(config) * d)
        check_width(module, "o_proj", "in_features", config.num_attention_heads * d)
    return modules

def check_width(module, name, feature, width):
    """Refuse a projection of another width than its heads have together; one that does not exist has no wrong width."""
    found = getattr(getattr(module, name, None), feature, width)
    if found != width:
        raise ValueError(
            "queries, keys, values and outputs must share one head dim, but "
            f"{name} has {found} channels for heads of {width} together")

def register_attention(name, function):
    """Let model.set_attn_implementation(name) choose `function`; its masks are those of "sdpa"."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)

def grouped(query, key, scaling):
    """Group queries (b, h, t, d) by KV head, (b, g, r, t, d), for an attention that multiplies scores by d^(-1/2).

    The window cache scales scores by d^(-1/2); if the model's `scaling` is another one, the queries make up for it.
    """
    d = query.shape[-1]
    factor = 1.0 if scaling is None else scaling * d ** 0.5
    if abs(factor - 1) > 1e-6:
        query = query * factor
    return query.unflatten(1, (key.shape[1], -1))

def as_transforms(transforms):
    """Return transforms in float32. A dictionary holds what a transforms file does: "k" and "v", perhaps H' and harm.

    It does not say how they were made: with H' they count as refined, else as the paper's, and several blocks as groups.
    Raises ValueError unless the parts fit each other.
    """
    if isinstance(transforms, dict):
        check_layout(transforms)
        for name, side in {"k": "keys", "v": "values"}.items():
            if name not in transforms:
                raise ValueError(f"the transforms lack those of the {side}")
        keys = Basis(transforms["k"], transforms.get("k_hessian"), transforms.get("k_harm"))
        values = Basis(transforms["v"], transforms.get("v_hessian"), transforms.get("v_harm"))
        refine = PAPER if keys.hessian is None else REFINED
        check_transform(keys.transform)
        n, m = keys.transform.shape[2:4]
        transforms = Transforms(keys, values, refine, None if n == 1 else m)
    if not isinstance(transforms, Transforms):
        kind = type(transforms).__name__
        raise ValueError(f"transforms come from calibrate or load_transforms, not from a {kind}")

    keys, values, refine, group = transforms
    keys = float_basis(keys, refine, group)
    values = float_basis(values, refine, group)
    return Transforms(keys, values, refine, group)

def check_transform(T):
    """Refuse what is no transform (l, g, n, m, m) of finite numbers."""
    is_transform = torch.is_tensor(T) and T.is_floating_point() and T.dim() == 5
    if not is_transform or T.shape[3] != T.shape[4]:
        raise ValueError(
            "a transform is a floating-point tensor of (layers, KV heads, blocks, m, m)")
    if not T.isfinite().all():
        raise ValueError("the transforms hold NaN or infinity")

def float_basis(basis, refine, group):
    """Return a basis in float32. Raises ValueError if it has H' without feedback in `refine`, or the reverse.

    With H', codes are searched group by group: its blocks must be the groups.
    """
    T, H, harm = basis
    check_transform(T)
    if (H is not None) != refine.feedback:
        raise ValueError("the transforms hold H', or their `refine` says feedback, but not both")
    if H is None:
        return Basis(T.float(), harm=harm)

    m = T.shape[-1]
    d = T.shape[2] * m
    if H.shape != T.shape or m != (group or d):
        raise ValueError(
            f"H' of shape {tuple(H.shape)} does not fit blocks of {m} and groups of {group}")
    return Basis(T.float(), H.float(), harm)


# ----------------------------------------------------------------------------------------------------------------
# Calibration
#
# The model runs over a text with an attention that adds each layer's queries, keys and values to its moments. W_O is
# what o_proj makes of the identity, so that LoRA, quantized and offloaded weights count as they act.

def calibration_tokens(model, tokenizer, text, length, sequences):
    """Tokenize a text, or a list of texts, and cut at most `sequences` pieces of `length` tokens: a list of (t,).

    Raises ValueError if there is nothing to cut, or if the model has fewer positions.
    """
    for name, count in {"length": length, "sequences": sequences}.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is a number of at least 1, not {count!r}")
    positions = getattr(decoder_config(model.config), "max_position_embeddings", None) or length
    if length > positions:
        raise ValueError(
            f"a length of {length} tokens is more than the model's {positions} positions")
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, (list, tuple)) or not all(isinstance(part, str) for part in texts):
        raise ValueError("the text to calibrate on is a string or a list of strings")

    ids = []
    for part in texts:
        ids += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ValueError("there is no text to calibrate on: it has no tokens")
    asked = sequences * length
    if len(ids) < asked / 2:
        warnings.warn(
            f"the text has {len(ids)} tokens to calibrate on, {asked} were asked for: with few "
            "tokens the transforms fit them only", stacklevel=3)
    return torch.tensor(ids[:asked], device="cpu").split(length)

@contextmanager
def observed_attention(model, observe):
    """Run a model with `observe` as its attention, in evaluation mode; afterwards all is as it was."""
    before = model.config._attn_implementation
    modes = {module: module.training for module in model.modules()}
    register_attention("wush_calibrate", observe)
    try:
        model.eval().set_attn_implementation("wush_calibrate")
        yield
    finally:
        model.set_attn_implementation(before)
        for module, mode in modes.items():
            module.training = mode

        # The register lives as long as the process, and must not hold on to the moments.
        register_attention("wush_calibrate", sdpa_attention_forward)

def output_projection(module, q):
    """Return W_O as blocks of query heads, (g, r, d, D), for queries q (b, g, r, t, d)."""
    g, r, d = q.shape[1], q.shape[2], q.shape[4]
    I = torch.eye(g * r * d, dtype=q.dtype, device=q.device)
    bias = module.o_proj(0 * I[:1])
    return (module.o_proj(I) - bias).unflatten(0, (g, r, d))

def is_autocast(device):
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)

@contextmanager
def full_precision(device):
    """Compute in the tensors' own dtypes, whatever torch.autocast says outside."""
    if not is_autocast(device):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield

def collect(model, sequences, attention_aware):
    """Sum the moments of a transformers model over sequences (t,), as `collect_moments` does over ours."""
    modules = attention_modules(model, "o_proj")
    moments = [None] * len(modules)

    def observe(module, query, key, value, mask, scaling=None, **options):
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise ValueError("queries, keys, values and outputs must share one head dim")
        l = module.layer_idx
        with full_precision(query.device):
            q = grouped(query, key, scaling)
            if moments[l] is None:
                moments[l] = LayerMoments(output_projection(module, q), attention_aware)
            moments[l].add(q, key, value)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)

    with observed_attention(model, observe):
        for ids in tqdm(sequences, "calibrate", unit="seq", disable=None):
            model.base_model(ids[None].to(model.device), use_cache=False)
            if None in moments:
                raise ValueError(
                    "the model's attention does not use transformers' AttentionInterface")

    # The layers may live on several devices.
    for layer in moments:
        layer.total = {name: total.cpu() for name, total in layer.total.items()}
    return stack_moments(moments)

@torch.no_grad()
def calibrate(
        model,
        tokenizer,
        text,
        *,
        length=1024,
        sequences=16,
        transform="wush",
        refine=REFINED,
        group=None):
    """Derive transforms for a transformers model from `sequences` pieces of `length` tokens of a text, or fewer.

    The model stays as it was. Raises ValueError for a model that WushCache cannot serve or whose values are folded.
    """
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise ValueError(f"a {kind} is not a model of transformers, which is what calibrate takes")
    if transform not in TRANSFORMS:
        raise ValueError(f"there is no transform {transform!r}, only {', '.join(TRANSFORMS)}")
    if not isinstance(refine, Refine):
        raise ValueError(f"refine is a Refine, such as REFINED or PAPER, not {refine!r}")
    config = decoder_config(model.config)
    if group is not None and (type(group) is not int or group < 1 or head_dim(config) % group):
        raise ValueError(f"groups of {group} channels do not divide a head of {head_dim(config)}")
    if any(is_folded(module) for module in attention_modules(model, "o_proj")):
        raise ValueError("the model's values are folded: calibrate the model as it was")

    pieces = calibration_tokens(model, tokenizer, text, length, sequences)
    moments = collect(model, pieces, TRANSFORMS[transform].is_attention_aware)
    return derive(moments, transform, refine, group)


# ----------------------------------------------------------------------------------------------------------------
# Folding and sharding
#
# A fold changes the weights of a model for a while, and a cache must know: values come out transformed. A cache may be
# older than the fold, or come from a file, so the attention modules tell it: their hooks announce the fold as they run.

FOLD = ContextVar("FOLD", default=None)      # the digest of the running module's T_V, as it was passed to `folded_values`

class Announcement:
    """Hooks on an attention module which set FOLD while it runs: `WushCache.update` is not told which module calls."""

    def __init__(self, T):
        self.digest = digest(T)

    def begin(self, module, arguments):
        FOLD.set(self.digest)

    def end(self, module, arguments, output):
        FOLD.set(None)

    def attach(self, module):
        """Return the handles that remove the hooks."""
        before = module.register_forward_pre_hook(self.begin)
        after = module.register_forward_hook(self.end, always_call=True)
        return [before, after]

def is_folded(module):
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), Announcement) for hook in hooks)

def in_range(T_V):
    """Scale each head's T_V (..., g, n, m, m) by a power of two, so that no |T v| is larger than the largest |v|.

    In float16 it might overflow otherwise. In float32 and bfloat16 the powers of two change no digit. An entry of T v is
    at most the sum of a row's |T| times the largest |v|. Fold and cache both use this T_V.
    """
    row_sums = T_V.abs().sum(-1).amax((-2, -1))                  # (..., g)
    exponent = row_sums.log2().ceil().clamp(min=0)
    return T_V * torch.exp2(-exponent)[..., None, None, None]

def foldable_parameters(module):
    """Map names of FOLDS to the weights of an attention. Raises ValueError if they are not plain numbers."""
    parameters = {}
    for name, parameter in module.named_parameters():
        if name == "o_proj.bias" or not name.startswith(("v_proj", "o_proj")):
            continue
        if name not in FOLDS or not parameter.is_floating_point() or parameter.is_meta:
            raise ValueError(
                "values fold into plain weights, not into quantized or offloaded ones, nor LoRA's")
        parameters[name] = parameter
    return parameters

@contextmanager
def folded_values(model, transforms):
    """Fold T_V into a model for a while: its values come out transformed, which saves WushCache that work.

    Raises ValueError for a model that is folded already, or of other heads, or without plain weights.
    """
    T_V = as_transforms(transforms).values.transform
    modules = attention_modules(model, "v_proj", "o_proj")
    if any(is_folded(module) for module in modules):
        raise ValueError("this model's values are folded already")
    parameters = [foldable_parameters(module) for module in modules]
    channels = sum(len(module.v_proj.weight) for module in modules)
    if len(T_V) != len(modules) or T_V.shape[:4].numel() != channels:
        raise ValueError(f"T_V of shape {tuple(T_V.shape)} is not of the model's layers and heads")

    plain = [{name: p.data for name, p in of_layer.items()} for of_layer in parameters]
    handles = []
    try:
        for module, of_layer, T in zip(modules, parameters, T_V):
            for name, parameter in of_layer.items():
                parameter.data = FOLDS[name](in_range(T).to(parameter.device), parameter.data)
            handles += Announcement(T).attach(module)
        yield model
    finally:
        for of_layer, data in zip(parameters, plain):
            for name, parameter in of_layer.items():
                parameter.data = data[name]
        for handle in handles:
            handle.remove()

def shard_transforms(transforms, rank, world_size):
    """Take the KV heads of one rank of a tensor-parallel model; where ranks exceed heads, they share them.

    Raises ValueError for a rank that there is not, and if neither number divides the other.
    """
    keys, values, refine, group = as_transforms(transforms)
    heads = keys.transform.shape[1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    if heads % world_size and world_size % heads:
        raise ValueError(f"{heads} KV heads do not go to {world_size} ranks")
    first = rank * heads // world_size
    own = slice(first, first + max(heads // world_size, 1))

    def shard(basis):
        H = None if basis.hessian is None else basis.hessian[:, own].contiguous()
        return basis._replace(transform=basis.transform[:, own].contiguous(), hessian=H)

    return Transforms(shard(keys), shard(values), refine, group)


# ----------------------------------------------------------------------------------------------------------------
# Attention "wush"
#
# Transformers calls an attention with the keys that the cache's `update` has returned. Their mark names the layer of the
# cache, and this layer has kept the call's true keys and values until now, when the queries are there too.

# The padding that each living mask shows: it is read once for all layers of a call, since reading waits for a GPU.
PADDING = WeakTensorKeyDictionary()

def row_padding(mask, batch, length):
    """Read each row's left padding from the mask (b, 1, t, length) of the last t tokens.

    Raises ValueError for a mask unless each query sees exactly the columns from the end of the padding up to the query's
    own. Queries that are padding themselves may see anything.
    """
    refusal = (
        f"attention 'wush' serves causal masks with padding at the left only, of {length} columns")
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != length:
        raise ValueError(refusal)
    visible = mask
    if mask.dtype != torch.bool:
        # Numbers that are added to the scores: zero, or so low that nothing is left.
        visible = mask == 0
        is_hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not (visible | is_hidden).all():
            raise ValueError(refusal)

    # The last query tells the padding, and every other query must agree.
    visible = visible[:, 0].expand(batch, -1, -1)                # (b, t, length)
    t = visible.shape[1]
    if t == 0:
        return [0] * batch
    pad = length - visible[:, -1].sum(-1)
    columns = torch.arange(length, device=mask.device)
    own_column = columns[length - t:, None]
    is_padding = columns < pad[:, None, None]
    expected = (columns <= own_column) & ~is_padding
    is_padding_query = own_column < pad[:, None, None]
    if not ((visible == expected) | is_padding_query).all():
        raise ValueError(refusal)
    return pad.tolist()

class NoGradient(torch.autograd.Function):
    """Pass x on as if computed from `like`: where `like` wants gradients, a backward pass raises.

    Otherwise it would leave out, unsaid, what went through the cache.
    """

    @staticmethod
    def forward(context, x, like):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        raise ValueError("WushCache passes no gradients on")

def without_gradient(x, like):
    with torch.enable_grad():                                    # its callers compute without gradients
        return NoGradient.apply(x.detach(), like)

def wush_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **options):
    """Attend through the window cache whose `update` these keys come from; without one, as "sdpa" does."""
    layer = getattr(key, "wush_layer", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **options)
    k, v = layer.take_waiting()
    layer.config = module.config         # which `update` asks for the attention; so far it may have been a copy

    unknown = []
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if options.get(name) is not None:
            unknown.append(name)
    if dropout > 0:
        unknown.append("dropout")
    if options.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ValueError(f"attention 'wush' knows no {' and no '.join(unknown)}")

    o = layer.attend(grouped(query, k, scaling), k, v, mask)     # (b, g, r, t, d)
    return o.flatten(1, 2).transpose(1, 2).contiguous(), None

register_attention("wush", wush_attention)                       # may be chosen before a WushCache exists


# ----------------------------------------------------------------------------------------------------------------
# What generation does to a window cache
#
# Transformers drops tokens of a cache, reorders its rows, copies it, and saves it. Tokens that are packed stay packed,
# as they are.

def crop(window, count):
    """Drop the last `count` tokens of every row.

    Counts alone say which slots of the buffers are tokens. Where recent tokens do not suffice, packed ones are dropped.
    """
    sink = window.windows.sink
    window.n_tokens = [max(n - count, 0) for n in window.n_tokens]
    rows = zip(window.n_packed, window.n_tokens)
    window.n_packed = [min(packed, max(n - sink, 0)) for packed, n in rows]

def change_buffers(store, change):
    """Replace each buffer x (b, g, capacity, ...) of a store by change(x)."""
    store.sink, store.codes, store.pairs, store.recent = [change(x) for x in store.buffers()]

def select(window, rows):
    """Keep these batch rows, a list of indices, in this order, some perhaps several times."""
    index = torch.tensor(rows, device=window.keys.recent.device)
    for store in (window.keys, window.values):
        change_buffers(store, partial(torch.index_select, dim=0, index=index))
    window.n_tokens = [window.n_tokens[row] for row in rows]
    window.n_packed = [window.n_packed[row] for row in rows]

def copied(window):
    """Copy the tokens of a window cache; the transforms are shared."""
    window = copy.copy(window)
    window.n_tokens = list(window.n_tokens)
    window.n_packed = list(window.n_packed)
    window.keys = copy.copy(window.keys)
    window.values = copy.copy(window.values)
    for store in (window.keys, window.values):
        change_buffers(store, torch.clone)
    return window

def state(window):
    """Return all that a window cache holds, without its spare room for packed tokens, for `restore`."""
    packed = max(window.n_packed)

    def held(store):
        codes = store.codes[:, :, :packed].clone()
        pairs = store.pairs[:, :, :packed].clone()
        return [store.sink.clone(), codes, pairs, store.recent.clone()]

    return {
        "n_tokens": list(window.n_tokens),
        "n_packed": list(window.n_packed),
        "keys": held(window.keys),
        "values": held(window.values),
    }

def restore(window, saved):
    """Fill an empty window cache with what `state` returned. Raises ValueError for the state of another shape."""
    window.n_tokens = list(saved["n_tokens"])
    window.n_packed = list(saved["n_packed"])
    for store, buffers in [(window.keys, saved["keys"]), (window.values, saved["values"])]:
        device = store.recent.device
        for empty, buffer in zip(store.buffers(), buffers):
            check_buffer(buffer, empty)
        store.sink, store.codes, store.pairs, store.recent = [
            buffer.to(device, copy=True) for buffer in buffers]

def check_buffer(buffer, empty):
    """Refuse a buffer that cannot take the place of an empty one: only in its third axis, tokens, may it differ."""
    same_heads = buffer.shape[:2] == empty.shape[:2]
    same_entries = buffer.shape[3:] == empty.shape[3:] and buffer.dtype == empty.dtype
    if not same_heads or not same_entries:
        raise ValueError(f"the saved tokens are of shape {tuple(buffer.shape)} and {buffer.dtype}")


# ----------------------------------------------------------------------------------------------------------------
# The cache
#
# A WushCache has a WushLayer per layer of the model. A WushLayer holds a WindowCache, which it makes when the first keys
# show the batch, the dtype and the device, and translates transformers' calls into those of the WindowCache.

def shows_padding(options):
    """Say whether the options of `update` show padding: two neighbours of a row at the same position."""
    for part in options:
        if not isinstance(part, dict):
            continue
        positions = part.get("position_ids")                     # (b, t), or with those of images (3, b, t)
        if positions is not None:
            positions = positions.view(-1, *positions.shape[-2:])[0, ..., None]
        else:
            positions = part.get("cos")                          # transformers 5.0 passes rotations (b, t, d) instead
        if positions is not None:
            is_repeated = positions[:, 1:] == positions[:, :-1]
            return bool(is_repeated.all(-1).any())
    return False

class MarkedKeys(torch.Tensor):
    """What `update` returns for attention "wush": it names its layer, and any other attention is refused at once."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        # Attributes, such as the shape, may be read: torch calls their `__get__`.
        if function.__name__ in ("__get__", "size", "dim"):
            return super().__torch_function__(function, types, args, kwargs)
        raise ValueError(
            "keys for attention 'wush' came to another one: make the cache with the config of the "
            "model that runs, WushCache(model.config, ...)")

class WushLayer:
    """A layer of WushCache: a WindowCache of k and T_V v.

    `length` counts padding, as transformers does; the windows hold none of it if "wush" attended.
    """

    # What transformers asks of a cache layer, some of it in some versions only.
    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, config, l, T_V, scheme, windows):
        self.config = config
        self.l = l
        self.given_T_V = T_V             # of this layer, (g, n, m, m)
        self.scheme = scheme             # of all layers
        self.windows = windows
        self.reset()

    def reset(self):
        self.window = None
        self.length = 0
        self.waiting = None              # this call's keys and values, until attention "wush" takes them

    def __deepcopy__(self, memo):
        """Copy the tokens, share the rest: the transforms, and the model's config, which may yet change."""
        new = copy.copy(self)
        new.window = None if self.window is None else copied(self.window)
        return new

    @cached_property
    def digest(self):
        return digest(self.given_T_V)

    @property
    def is_initialized(self):
        return self.window is not None

    def lazy_initialization(self, k, v=None):
        """Make the window cache for keys like k (b, g, t, d), or take it along to their device."""
        if self.window is not None and self.window.keys.recent.device == k.device:
            return
        before = None if self.window is None else state(self.window)

        g, n, m = self.given_T_V.shape[:3]
        batch, heads, _, d = k.shape
        if (heads, d) != (g, n * m):
            raise ValueError(
                f"the keys are {heads} heads of {d} channels, the transforms {g} heads of {n * m}")
        self.T_V = in_range(self.given_T_V.to(k.device))
        self.T_V_inverse = inverse_transpose(self.T_V).mT
        scheme = self.scheme.folded().layer(self.l, k.device)
        self.window = WindowCache(batch, heads, d, scheme, self.windows, k.dtype, k.device)
        if before is not None:
            restore(self.window, before)

    def check(self, k, v):
        """Refuse keys and values that are not like those in the window cache."""
        batch, heads, _, d = self.window.keys.recent.shape
        if k.dim() != 4 or k.shape != v.shape:
            raise ValueError(
                f"keys of shape {tuple(k.shape)} and values of shape {tuple(v.shape)} "
                "do not share one shape")
        if len(k) != batch:
            raise ValueError(f"a batch of {len(k)} meets a cache of {batch}")
        if (k.shape[1], k.shape[3]) != (heads, d):
            raise ValueError(
                f"{k.shape[1]} heads of {k.shape[3]} channels meet a cache of {heads} heads of {d}")
        dtype = self.window.keys.recent.dtype
        if k.dtype != dtype and not is_autocast(k.device):
            raise ValueError(f"keys in {k.dtype} meet a cache in {dtype}")
        if FOLD.get() not in (None, self.digest):
            raise ValueError("the model has another T_V folded in than that of the cache")

    @torch.inference_mode(False)             # what is begun in inference mode may go on outside of it
    @torch.no_grad()
    def update(self, k, v, *args, **kwargs):
        """Take in a call's keys and values (b, g, t, d): keep them for "wush", or return all cached ones."""
        self.lazy_initialization(k)
        self.check(k, v)
        if self.config._attn_implementation == "wush":
            # The attention will be given what is returned here, and nothing else says which layer it serves. So return a
            # placeholder with the shape of all cached keys, one number large, that names the layer. `length` stays until
            # `attend`, as an attention may refuse.
            self.waiting = (k, v)
            batch, heads, t, d = k.shape
            empty = k.new_empty(()).expand(batch, heads, self.length + t, d)
            marked = empty.as_subclass(MarkedKeys)
            marked.wush_layer = self
            return marked, marked

        if self.l == 0 and self.length == 0:
            self.warn([*args, *kwargs.values()])
        with full_precision(k.device):
            dtype = self.window.keys.recent.dtype
            no_padding = [0] * len(k)                            # padding is stored as if it were text
            self.window.append(k.to(dtype), self.transformed(v.to(dtype)), no_padding)
            self.length += k.shape[2]

            # Read before the flush: a call sees its own tokens as they are.
            keys = self.keys
            values = self.values
            self.window.flush()
        return without_gradient(keys, k), without_gradient(values, v)

    def warn(self, options):
        """Say what a model pays that does not run attention "wush"."""
        warnings.warn(
            "WushCache dequantizes all tokens at every step; to read the packed ones instead: "
            "model.set_attn_implementation('wush')", stacklevel=6)
        if shows_padding(options):
            warnings.warn(
                "WushCache stores left padding like text, which costs bytes and quality; to leave "
                "it out: model.set_attn_implementation('wush')", stacklevel=6)

    @property
    def keys(self):
        """All cached keys (b, g, s, d), dequantized; padding that was left out is zero."""
        return self.window.read(self.window.keys, self.length)

    @property
    def values(self):
        v = self.window.read(self.window.values, self.length)
        return self.transformed_back(v)

    def transformed(self, v):
        """Return T_V v, as a folded model's values are already."""
        return v if FOLD.get() else apply(self.T_V, v).to(v.dtype)

    def transformed_back(self, v):
        return v if FOLD.get() else apply(self.T_V_inverse, v).to(v.dtype)

    def take_waiting(self):
        """Hand over the keys and values of this call, once: marked keys of an earlier call find none."""
        if self.waiting is None:
            raise ValueError("attention 'wush' was given the keys of another call")
        k, v = self.waiting
        self.waiting = None
        return k, v

    @torch.inference_mode(False)
    @torch.no_grad()
    def attend(self, q, k, v, mask):
        """Attend as WindowCache does, and store k and v. The mask shows the padding, which must not change."""
        before = self.length
        batch, t = k.shape[0], k.shape[2]
        pad = [0] * batch
        if mask is not None:
            # All layers of a call share a mask. Layer 0 reads it anew, as it may have been rewritten since the last call.
            if self.l == 0 or mask not in PADDING:
                PADDING[mask] = row_padding(mask, batch, before + t)
            pad = PADDING[mask]

        # The mask has all columns, and the first `before` were cached by earlier calls. Their padding was left out of the
        # windows, though `length` counts it. The rest of the padding is this call's.
        left_out = [before - n for n in self.window.n_tokens]
        if [min(padding, before) for padding in pad] != left_out:
            raise ValueError("the mask hides other columns than were padding when they were cached")

        with full_precision(k.device):
            dtype = self.window.keys.recent.dtype
            new_pad = [max(padding - before, 0) for padding in pad]
            v = self.transformed(v.to(dtype))
            o = self.window.attend(q.to(dtype), k.to(dtype), v, new_pad)
            o = self.transformed_back(o)
        self.length += t
        return without_gradient(o, q)

    def get_seq_length(self, *args):
        return self.length

    def get_mask_sizes(self, query):
        """Return (length with the new tokens, 0). `query` is their number; in transformers 5.0, their positions."""
        t = query if isinstance(query, int) else len(query)
        return self.length + t, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens):
        """Drop as many tokens as a negative number says; a positive one is the length to keep, as in transformers 5.0.

        Zero drops none.
        """
        count = min(-tokens, self.length) if tokens <= 0 else max(self.length - tokens, 0)
        if self.window is not None:
            crop(self.window, count)
        self.length -= count

    def batch_select_indices(self, indices):
        """Keep these rows of the batch: indices, also negative ones, or a mask."""
        if self.window is not None:
            rows = torch.arange(len(self.window.n_tokens), device="cpu")
            select(self.window, rows[indices.cpu()].tolist())

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats):
        if self.window is not None:
            rows = range(len(self.window.n_tokens))
            select(self.window, [row for row in rows for _ in range(repeats)])

CacheLayerMixin.register(WushLayer)      # by name only: the mixin's own `keys`, `values` and `reset` hold tensors

def check_fit(config, transforms):
    """Refuse transforms of other layers, heads or head dims than the model's."""
    layers = config.num_hidden_layers
    d = head_dim(config)
    heads = kv_heads(config)
    for basis in (transforms.keys, transforms.values):
        l, g, n, m, _ = basis.transform.shape
        if l != layers:
            raise ValueError(f"the transforms are of {l} layers, the model has {layers}")
        if n * m != d:
            raise ValueError(f"the transforms are of head dim {n * m}, the model's is {d}")

        # A rank of a tensor-parallel model has a share of the heads.
        if g < 1 or heads % g:
            raise ValueError(f"the transforms are of {g} KV heads, the model has {heads}")
    if transforms.keys.transform.shape[1] != transforms.values.transform.shape[1]:
        raise ValueError("the transforms of keys and of values are not of the same heads")

SAVED = "WushCache 2"      # the format of what `WushCache.save` writes

class WushCache(Cache):
    """A transformers Cache in few bits: WushCache(model.config, transforms, bits=2).

    `transforms` come from `calibrate` or `load_transforms`, or are {"k": T_K, "v": T_V} as serving reads them; `bits`
    are 2, 3, 4, 8 or, for off, 16: one number or (of keys, of values). A fraction between 2 and 4 is the layers' average,
    for transforms with harm. Raises ValueError for what it cannot serve.
    """

    def __init__(self, config, transforms, bits=2, windows=Windows()):
        config = decoder_config(config)
        transforms = as_transforms(transforms)
        check_fit(config, transforms)
        self.config = config
        self.transforms = transforms
        self.bits = float(bits) if is_average(bits) else bits_of_sides(bits)
        self.windows = as_windows(windows)

        scheme = scheme_of(transforms, self.bits)
        layers = []
        for l, T_V in enumerate(transforms.values.transform):
            layers.append(WushLayer(config, l, T_V, scheme, self.windows))
        super().__init__(layers=layers)

    @property
    def nbytes(self):
        """Bytes of all storage held, spare room included."""
        return sum(layer.window.nbytes for layer in self.layers if layer.is_initialized)

    def __deepcopy__(self, memo):
        """Copy the tokens, and share the transforms."""
        new = WushCache(self.config, self.transforms, self.bits, self.windows)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return new

    def __reduce__(self):
        return WushCache.restored, (self.state(), self.config)

    def state(self):
        """Return all that the cache holds, as plain containers of tensors and numbers."""
        layers = []
        for layer in self.layers:
            layers.append((layer.length, state(layer.window) if layer.is_initialized else None))
        keys, values, refine, group = self.transforms
        return {
            "format": SAVED,
            "transforms": [tuple(keys), tuple(values), tuple(refine), group],
            "bits": self.bits,
            "windows": tuple(self.windows),
            "layers": layers,
        }

    @classmethod
    def restored(cls, saved, config):
        """Make the cache whose `state` is given, for a model's config."""
        keys, values, refine, group = saved["transforms"]
        transforms = Transforms(Basis(*keys), Basis(*values), Refine(*refine), group)
        cache = cls(config, transforms, saved["bits"], saved["windows"])
        for layer, (length, held) in zip(cache.layers, saved["layers"]):
            layer.length = length
            if held is not None:
                layer.lazy_initialization(held["keys"][-1])
                restore(layer.window, held)
        return cache

    def save(self, path):
        """Write everything, transforms too: WushCache.load(path, config) goes on with the same tokens."""
        with explained(f"{path} cannot be written"):
            write_whole(path, partial(torch.save, self.state()))

    @classmethod
    def load(cls, path, config):
        """Read what `save` wrote. Raises ValueError for any other file, and for another model's."""
        with explained(f"{path} cannot be read as a saved cache"):
            saved = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(saved, dict) or saved.get("format") != SAVED:
            raise ValueError(f"{path} is not a cache that WushCache.save wrote")
        with explained(f"{path} is damaged, or another model's"):
            return cls.restored(saved, config)
