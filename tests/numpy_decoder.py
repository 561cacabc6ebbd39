"""A whole decoder in float64 numpy, written from the papers, one line of algebra after another; and a strategy that
draws configurations of every part that the decoder has."""

import math
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from mlxlm.config import ModelConfig
from mlxlm.config.components import QK_NORMS


def norm(x, weights, name, c):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019)."""
    weight, bias = weights.get(f"{name}.weight", 1), weights.get(f"{name}.bias", 0)
    of_heads = name.endswith(("q_norm", "k_norm"))
    if of_heads and c.qk_norm == "layer_per_head":
        weight = weight.reshape(x.shape[1], 1, -1)
    if "layer" in (c.qk_norm if of_heads else c.norm):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(x.var(-1, keepdims=True) + c.rms_norm_eps) * weight + bias
    weight = weight + c.norm_unit_offset if f"{name}.weight" in weights else 1
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weight


def linear(x, weights, name):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def sizes(c, layer):
    """Number of key heads, and size of a head."""
    if c.window(layer):
        return c.num_key_value_heads, c.head_dim
    return c.num_global_key_value_heads or c.num_key_value_heads, c.global_head_dim or c.head_dim


def frequencies(c, length, layer):
    """Radians per position of each pair of dimensions, and the factor of rotated queries and keys."""
    dims = c.qk_rope_head_dim or int(sizes(c, layer)[1] * c.partial_rotary_factor)
    if c.rope_local_base_freq and c.window(layer):
        return c.rope_local_base_freq ** (-2.0 * np.arange(dims // 2) / dims), 1.0
    scaling, longest = c.rope_scaling or {"rope_type": "default"}, c.max_position_embeddings
    pairs, base, kind = np.arange(dims // 2), c.rope_theta, scaling["rope_type"]
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if kind == "dynamic" and length > longest:  # the base grows with the text
        base *= (factor * length / longest - factor + 1) ** (dims / (dims - 2))
    plain = base ** (-2.0 * pairs / dims)
    if kind == "linear":  # Chen et al. 2023: positions are divided
        return plain / factor, 1.0
    if kind == "llama3":
        share = (original * plain / (2 * math.pi) - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        share = np.clip(share, 0, 1)
        return plain * share + plain / factor * (1 - share), 1.0
    if kind == "yarn":  # Peng et al. 2023, section 3.2 and 3.4: a ramp over the pairs' numbers

        def pair(turns):
            return dims * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dims - 1)
        ramp = np.clip((pairs - low) / (high - low or 0.001), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    if kind == "proportional":  # Gemma 4: the last pairs aren't rotated
        return np.where(pairs < int(scaling["partial_rotary_factor"] * dims / 2), plain, 0) / factor, 1.0
    if kind == "longrope":  # Ding et al. 2024
        ratio = longest / original
        grown = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
        return plain / np.array(scaling["long_factor" if length > original else "short_factor"]), grown
    return plain, 1.0


def rotated(x, positions, c, length, layer):
    """x `[B, H, T, D]`: pair i is a complex number of dimensions i and i + dims / 2 (Su et al. 2021)."""
    turn, size = frequencies(c, length, layer)
    half, dims = len(turn), 2 * len(turn)
    z = (x[..., :half] + 1j * x[..., half:dims]) * size * np.exp(1j * positions[:, None, :, None] * turn)
    return np.concatenate([z.real, z.imag, x[..., dims:]], axis=-1)


def temperatures(c, positions, has_rope):
    """Llama 4: the logarithm of the number of lengths that a text has been grows by 1."""
    scaling = c.rope_scaling or {}
    beta = scaling.get("llama_4_scaling_beta") if has_rope else c.attn_scale
    length = scaling.get("original_max_position_embeddings") if has_rope else c.floor_scale
    return 1 + (beta or 0) * np.log((positions + (not has_rope)) // (length or 1) + 1)


def slopes(heads):
    """Press et al. 2021: a geometric series from 2^(-8/n); in between, every other one of twice as many."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    power = 2 ** int(math.log2(heads))
    return slopes(power) + slopes(2 * power)[::2][: heads - power]


def attention(x, weights, name, c, layer, positions, segment_ids, shared):
    """`shared` has the last keys and values of each type of layer, which the last layers read."""
    B, T, _ = x.shape
    H, (K, D) = c.num_attention_heads, sizes(c, layer)
    kind = c.layer_types and c.layer_types[layer]
    has_rope = c.positions == "rope" and (c.rope_layers is None or c.rope_layers[layer])

    def heads(part, projection):
        y = linear(x, weights, f"{name}.{projection}_proj")
        if c.qk_norm == "projection" and part != "v":
            y = norm(y, weights, f"{name}.{part}_norm", c)
        y = np.clip(y, -c.clip_qkv, c.clip_qkv) if c.clip_qkv else y
        y = y.reshape(B, T, -1, D).transpose(0, 2, 1, 3)
        if part == "v":
            return y / np.sqrt((y**2).mean(-1, keepdims=True) + c.rms_norm_eps) if c.value_norm else y
        if c.qk_norm not in (None, "projection", None if has_rope else "l2"):
            y = norm(y, weights, f"{name}.{part}_norm", c)
        return rotated(y, positions, c, T, layer) if has_rope else y

    q = heads("q", "q") * temperatures(c, positions, has_rope)[:, None, :, None]
    if layer < c.num_hidden_layers - c.num_kv_shared_layers:
        shared[kind] = heads("k", "k"), heads("v", "k" if c.attention_k_eq_v and not c.window(layer) else "v")
    k, v = shared[kind]
    out = np.zeros((B, H, T, D))
    scale = 1 / math.sqrt(c.query_pre_attn_scalar or D)
    back = np.arange(T)[:, None] - np.arange(T)  # how far a key is behind its row
    in_window = (back >= 0) & (back < (c.window(layer) or T))
    for b in range(B):
        chunks = positions[b] // (c.chunk(layer) or T)
        seen = in_window & (chunks == chunks[:, None])
        for h in range(H):
            group = h // (H // K)
            scores = scale * q[b, h] @ k[b, group].T
            if c.attn_logit_softcapping:
                scores = c.attn_logit_softcapping * np.tanh(scores / c.attn_logit_softcapping)
            if c.positions == "alibi":
                scores = scores - slopes(H)[h] * (scale if c.alibi_scaled else 1) * back
            e = np.exp(np.where(seen & (segment_ids[b][None] == segment_ids[b][:, None]), scores, -np.inf))
            sink = np.exp(weights[f"{name}.sinks"][h]) if c.attention_sinks else 0
            out[b, h] = e / (e.sum(-1, keepdims=True) + sink) @ v[b, group]
    out = out.transpose(0, 2, 1, 3).reshape(B, T, H * D)
    if c.attn_output_gate:
        out = out * activation(linear(x, weights, f"{name}.gate_proj"), "sigmoid")
    return linear(out, weights, f"{name}.o_proj")


def short_conv(x, weights, name, c, segment_ids):
    """LFM2: C · conv(B · x), one position after another."""
    B, C, x = np.split(linear(x, weights, f"{name}.in_proj"), 3, axis=-1)
    kernel, y, out = weights[f"{name}.conv.weight"], B * x, np.zeros_like(x)
    for t in range(x.shape[1]):
        for back in range(min(t + 1, c.conv_L_cache)):
            seen = segment_ids[:, t - back] == segment_ids[:, t]
            out[:, t] += seen[:, None] * y[:, t - back] * kernel[:, -1 - back]
    return linear(C * (out + weights.get(f"{name}.conv.bias", 0)), weights, f"{name}.out_proj")


def gated_delta(x, weights, name, c, segment_ids):
    """Yang et al. 2025, one token after another, with the convolution, gates and norm of Qwen3-Next."""
    B, T, _ = x.shape
    H, G, K, V = (
        getattr(c, f"linear_{part}") for part in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    )
    q, k, v, z, b, a = (linear(x, weights, f"{name}.in_proj_{part}") for part in "qkvzba")
    mixed, kernel = np.concatenate([q, k, v], axis=-1), weights[f"{name}.conv1d.weight"]
    out = np.zeros((B, T, H * V))
    for row in range(B):
        state = np.zeros((H, K, V))
        for t in range(T):
            if t and segment_ids[row, t] != segment_ids[row, t - 1]:
                state = np.zeros((H, K, V))
            seen = [
                i for i in range(max(0, t - len(kernel[0]) + 1), t + 1) if segment_ids[row, i] == segment_ids[row, t]
            ]
            y = activation(sum(mixed[row, i] * kernel[:, i - t - 1] for i in seen), "silu")
            q, k, v = y[: G * K].reshape(G, K), y[G * K : 2 * G * K].reshape(G, K), y[2 * G * K :].reshape(H, V)
            q, k = (np.repeat(u / np.sqrt((u**2).sum(-1, keepdims=True) + 1e-6), H // G, axis=0) for u in (q, k))
            step = np.log1p(np.exp(a[row, t] + weights[f"{name}.dt_bias"]))
            state = state * np.exp(-np.exp(weights[f"{name}.A_log"]) * step)[:, None, None]
            change = (v - np.einsum("hk,hkv->hv", k, state)) / (1 + np.exp(-b[row, t]))[:, None]
            state = state + k[:, :, None] * change[:, None]
            read = np.einsum("hk,hkv->hv", q / math.sqrt(K), state)
            read = read / np.sqrt((read**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weights[f"{name}.norm.weight"]
            out[row, t] = read.reshape(-1) * activation(z[row, t], "silu")
    return linear(out, weights, f"{name}.out_proj")


def mamba2(x, weights, name, c, segment_ids):
    """Dao & Gu 2024, one token after another."""
    B, T, _ = x.shape
    H, G, P, S = (getattr(c, f"mamba_{part}") for part in ("n_heads", "n_groups", "d_head", "d_state"))
    z, xbc, dt = np.split(linear(x, weights, f"{name}.in_proj"), [H * P, 2 * H * P + 2 * G * S], axis=-1)
    dt = np.clip(np.log1p(np.exp(dt + weights[f"{name}.dt_bias"])), *(c.time_step_limit or (0, np.inf)))
    kernel, bias = weights[f"{name}.conv1d.weight"], weights.get(f"{name}.conv1d.bias", 0)
    out = np.zeros((B, T, H * P))
    for row in range(B):
        state = np.zeros((H, P, S))
        for t in range(T):
            if t and segment_ids[row, t] != segment_ids[row, t - 1]:
                state = np.zeros((H, P, S))
            seen = [
                i for i in range(max(0, t - len(kernel[0]) + 1), t + 1) if segment_ids[row, i] == segment_ids[row, t]
            ]
            y = activation(sum(xbc[row, i] * kernel[:, i - t - 1] for i in seen) + bias, "silu")
            u, b, g = y[: H * P].reshape(H, P), y[H * P : H * P + G * S], y[H * P + G * S :]
            b, g = (np.repeat(v.reshape(G, S), H // G, axis=0) for v in (b, g))
            decay = np.exp(-np.exp(weights[f"{name}.A_log"]) * dt[row, t])
            state = state * decay[:, None, None] + np.einsum("h,hp,hs->hps", dt[row, t], u, b)
            out[row, t] = (np.einsum("hps,hs->hp", state, g) + weights[f"{name}.D"][:, None] * u).reshape(-1)
    out = (out * activation(z, "silu")).reshape(B, T, G, -1)
    out = (out / np.sqrt((out**2).mean(-1, keepdims=True) + c.rms_norm_eps)).reshape(B, T, -1)
    return linear(out * weights[f"{name}.norm.weight"], weights, f"{name}.out_proj")


def latent_attention(x, weights, name, c, layer, positions, segment_ids):
    """DeepSeek-AI 2024, "DeepSeek-V2", equations 37 to 47; the pairs that are rotated are neighbors."""
    (B, T, _), H, N, R = x.shape, c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank

    def rms(y, which):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.{which}.weight"]

    def rotate(y):  # [B, heads, T, P]
        turn, size = frequencies(c, T, layer)
        z = (y[..., ::2] + 1j * y[..., 1::2]) * size * np.exp(1j * positions[:, None, :, None] * turn)
        return np.concatenate([z.real, z.imag], axis=-1)

    q = x if c.q_lora_rank is None else rms(linear(x, weights, f"{name}.q_a_proj"), "q_a_layernorm")
    q = linear(q, weights, f"{name}.{'q_proj' if c.q_lora_rank is None else 'q_b_proj'}")
    q = q.reshape(B, T, H, -1).transpose(0, 2, 1, 3)
    compressed = linear(x, weights, f"{name}.kv_a_proj_with_mqa")
    latent, shared = rms(compressed[..., :R], "kv_a_layernorm"), rotate(compressed[:, None, :, R:])[:, 0]
    rotated, down, up = rotate(q[..., N:]), weights[f"{name}.embed_q.weight"], weights[f"{name}.unembed_out.weight"]
    out = np.zeros((B, H, T, c.v_head_dim))
    for b in range(B):
        seen = np.tri(T, dtype=bool) & (segment_ids[b][None] == segment_ids[b][:, None])
        for h in range(H):
            scores = (q[b, h, :, :N] @ (latent[b] @ down[h]).T + rotated[b, h] @ shared[b].T) / math.sqrt(c.head_dim)
            e = np.exp(np.where(seen, scores, -np.inf))
            out[b, h] = e / e.sum(-1, keepdims=True) @ (latent[b] @ up[h].T)
    return linear(out.transpose(0, 2, 1, 3).reshape(B, T, -1), weights, f"{name}.o_proj")


def activation(x, name):
    if name in ("silu", "sigmoid"):
        sigmoid = 1 / (1 + np.exp(-x))
        return x * sigmoid if name == "silu" else sigmoid
    if name in ("relu", "relu2"):
        return np.maximum(x, 0) ** (2 if name == "relu2" else 1)
    if name == "gelu":
        return x * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(x, weights, name, c):
    inner = linear(x, weights, f"{name}.up_proj")
    if c.swiglu_limit:
        gate = np.minimum(linear(x, weights, f"{name}.gate_proj"), c.swiglu_limit)
        inner = (np.clip(inner, -c.swiglu_limit, c.swiglu_limit) + 1) * gate / (1 + np.exp(-c.swiglu_alpha * gate))
    elif c.mlp_gated:
        inner = activation(linear(x, weights, f"{name}.gate_proj"), c.hidden_act) * inner
    else:
        inner = activation(inner, c.hidden_act)
    return linear(inner, weights, f"{name}.down_proj")


def sinusoids(position, size):
    """Vaswani et al. 2017, section 3.5."""
    angles = [position / 10000 ** (2 * (i // 2) / size) for i in range(size)]
    return [math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)]


def per_layer_inputs(x, tokens, weights, c):
    """Gemma 4: `[B, T, layers, P]` from a table, scaled like embeddings, and from the embeddings."""
    shape = (*tokens.shape, c.num_hidden_layers, c.hidden_size_per_layer_input)
    table = weights["model.embed_tokens_per_layer.weight"][tokens].reshape(shape) * math.sqrt(shape[-1])
    projected = linear(x, weights, "model.per_layer_model_projection").reshape(shape) / math.sqrt(c.hidden_size)
    return (table + norm(projected, weights, "model.per_layer_projection_norm", c)) / math.sqrt(2)


def block(x, weights, name, c, layer, own, segment_ids, shared):
    """A layer's attention and feed-forward."""
    m = c.residual_multiplier

    def attend(y):
        if c.mixer(layer) == "short_conv":
            return short_conv(y, weights, f"{name}.conv", c, segment_ids)
        if c.mixer(layer) == "gated_delta":
            return gated_delta(y, weights, f"{name}.linear_attn", c, segment_ids)
        if c.mixer(layer) == "mamba2":
            return mamba2(y, weights, f"{name}.mamba", c, segment_ids)
        if c.kv_lora_rank is not None:
            return latent_attention(y, weights, f"{name}.self_attn", c, layer, own, segment_ids)
        return attention(y, weights, f"{name}.self_attn", c, layer, own, segment_ids, shared)

    def feed(y):
        return feed_forward(y, weights, f"{name}.mlp", c)

    def normed(y, which):
        return norm(y, weights, f"{name}.{which}_layernorm", c)

    if c.parallel_residual:
        first = normed(x, "input")
        return x + m * (attend(first) + feed(first if c.shared_norm else normed(x, "post_attention")))
    if c.norm_placement == "pre":
        x = x + m * attend(normed(x, "input"))
    elif c.norm_placement == "post":
        x = normed(x + m * attend(x), "post_attention")
    elif c.norm_placement == "output":
        x = x + m * normed(attend(x), "post_attention")
    else:
        x = x + m * normed(attend(normed(x, "input")), "post_attention")
    if c.mlp_layer_types and c.mlp_layer_types[layer] == "none":
        return x
    if c.norm_placement == "pre":
        return x + m * feed(normed(x, "post_attention"))
    if c.norm_placement == "post":
        return normed(x + m * feed(x), "post_feedforward")
    if c.norm_placement == "output":
        return x + m * normed(feed(x), "post_feedforward")
    return x + m * normed(feed(normed(x, "pre_feedforward")), "post_feedforward")


def decoder(weights, c, tokens, segment_ids=None):
    """Logits `[B, T, V]` of int `[B, T]`; `weights` by the decoder's own names."""
    B, T = tokens.shape
    segment_ids = np.zeros((B, T), int) if segment_ids is None else segment_ids
    own = np.array([[t - list(row).index(row[t]) for t in range(T)] for row in segment_ids])  # in each text
    x = weights["model.embed_tokens.weight"][tokens] * c.embedding_multiplier
    if c.positions == "learned":
        x = x + weights["model.embed_positions.weight"][own + c.position_offset]
    if c.positions == "sinusoidal":
        x = x + np.array([[sinusoids(p + c.position_offset, c.hidden_size) for p in row] for row in own])
    if c.embedding_norm:
        x = norm(x, weights, "model.embed_layernorm", c)
    inputs, shared = per_layer_inputs(x, tokens, weights, c) if c.hidden_size_per_layer_input else None, {}
    for layer in range(c.num_hidden_layers):
        name = f"model.layers.{layer}"
        x = block(x, weights, name, c, layer, own, segment_ids, shared)
        if inputs is not None:
            y = activation(linear(x, weights, f"{name}.per_layer_input_gate"), c.hidden_act) * inputs[:, :, layer]
            x = x + norm(
                linear(y, weights, f"{name}.per_layer_projection"), weights, f"{name}.post_per_layer_input_norm", c
            )
        x = x * weights.get(f"{name}.layer_scalar", 1)
    if c.norm_placement != "post":
        x = norm(x, weights, "model.norm", c)
    logits = (
        x @ weights["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"].T / c.logits_scaling
    )
    logits = logits + weights.get("lm_head.bias", 0)
    cap = c.final_logit_softcapping
    return cap * np.tanh(logits / cap) if cap else logits


LONGEST = 16
VOCABULARY = 31


@st.composite
def scalings(draw, pairs):
    kinds = ["linear", "llama3", "yarn", "longrope", "proportional"] + ["dynamic"] * (pairs > 1)
    kind, factors = draw(st.sampled_from(kinds)), st.lists(st.floats(0.5, 8), min_size=pairs, max_size=pairs)
    original = {"original_max_position_embeddings": draw(st.sampled_from([6, 12, LONGEST]))}
    if kind == "longrope":
        return {"rope_type": kind, "short_factor": draw(factors), "long_factor": draw(factors), **original}
    scaling = {"rope_type": kind, "factor": draw(st.sampled_from([1.0, 2.0, 4.0]))}
    if kind == "proportional":
        scaling["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.6, 1.0]))
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn" and draw(st.booleans()):
        scaling["llama_4_scaling_beta"] = 0.7
    return scaling | (original if kind in ("llama3", "yarn") else {})


def architectures():
    """Any decoder that can be: small, and every part drawn by itself."""
    return st.one_of(*(usual_architectures() for _ in range(4)), latent_architectures())


@st.composite
def latent_architectures(draw):
    sizes, rotary = st.integers(2, 12), draw(st.sampled_from([2, 4]))
    config = draw(usual_architectures())  # of one value, a norm leaves the sign, which a rounding can change
    plain = {f.name: f.default for f in fields(config) if f.name in NOT_LATENT}
    return config.with_changes(
        **plain,
        num_key_value_heads=config.num_attention_heads,
        rope_scaling=draw(st.none() | scalings(rotary // 2)),
        kv_lora_rank=draw(sizes),
        q_lora_rank=draw(st.none() | sizes),
        qk_nope_head_dim=draw(sizes),
        qk_rope_head_dim=rotary,
        v_head_dim=draw(sizes),
    )


NOT_LATENT = (
    "positions", "position_offset", "alibi_scaled", "partial_rotary_factor", "qk_norm", "sliding_window", "layer_types",
    "rope_layers", "rope_local_base_freq", "attention_out_bias", "attn_logit_softcapping", "query_pre_attn_scalar",
    "attention_sinks", "clip_qkv", "attention_chunk_size", "attn_scale", "floor_scale", "global_head_dim",
    "num_global_key_value_heads", "attention_k_eq_v", "value_norm", "num_kv_shared_layers",
)  # fmt: skip


def _can_share(types, first):
    """Whether the layers from `first` on can read the keys and values of earlier ones."""
    return set(types[first:]) <= set(types[:first]) - {"conv", "linear_attention", "mamba"}


@st.composite
def usual_architectures(draw):
    flags, heads = st.booleans(), draw(st.sampled_from([2, 3, 4, 6, 1]))
    layers, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([8, 4, 2]))
    placement = draw(st.sampled_from(["pre", "pre", "post", "output", "both"]))
    parallel, rms = placement == "pre" and draw(flags), draw(flags)
    positions = draw(st.sampled_from(["rope", "rope", "learned", "sinusoidal", "alibi", "none"]))
    swiglu_limit = draw(st.none() | st.just(0.5))  # a lower one makes outputs so small that norms amplify rounding
    tied = draw(flags)
    attn_scale = draw(st.none() | st.just(0.6))
    rope, window = positions == "rope", draw(st.none() | st.integers(1, LONGEST))
    share = draw(st.sampled_from([0.5, 1.0])) if head_dim > 2 else 1.0
    kinds = ["full_attention", *["sliding_attention"] * bool(window), "chunked_attention"]
    recurrent = ["conv", "linear_attention", "mamba"]
    types = draw(st.none() | st.lists(st.sampled_from(kinds + recurrent), min_size=layers - 1, max_size=layers - 1))
    linear, mamba = {}, {}
    if "mamba" in (types or ()):
        groups = draw(st.integers(1, 2))
        mamba = {
            "mamba_n_heads": groups * draw(st.integers(1, 2)), "mamba_n_groups": groups,
            "mamba_d_conv": draw(st.integers(1, 4)), "mamba_d_head": draw(st.sampled_from([4, 7])),
            "mamba_d_state": draw(st.sampled_from([4, 6])), "mamba_conv_bias": draw(flags),
            "mamba_proj_bias": draw(flags),
            "time_step_limit": draw(st.none() | st.just((0.5, 1.0))),
        }  # fmt: skip
    if "linear_attention" in (types or ()):
        groups = draw(st.integers(1, 2))
        linear = {
            "linear_num_value_heads": groups * draw(st.integers(1, 2)), "linear_num_key_heads": groups,
            "linear_key_head_dim": draw(st.sampled_from([4, 7])), "linear_conv_kernel_dim": draw(st.integers(1, 4)),
            "linear_value_head_dim": draw(st.sampled_from([4, 6])),
        }  # fmt: skip
    mlps = (
        None
        if parallel
        else draw(st.none() | st.lists(st.sampled_from(["dense", "none"]), min_size=layers, max_size=layers))
    )
    types = types if types is None else [*types, draw(st.sampled_from(kinds))]
    scaling = draw(st.none() | scalings(int(head_dim * share) // 2)) if rope else None
    kv_heads, qk_norm = [n for n in range(1, 7) if heads % n == 0], draw(st.sampled_from([None, "head", *QK_NORMS]))
    k_eq_v, shared, scaling_type = False, 0, (scaling or {}).get("rope_type")
    if qk_norm in (None, "head"):
        k_eq_v = draw(flags)
        alike = [layers - first for first in range(1, layers) if _can_share(types or ["?"] * layers, first)]
        shared = draw(st.sampled_from([0, *alike])) if scaling_type not in ("longrope", "dynamic") else 0
    return ModelConfig(
        global_head_dim=None if scaling_type in ("longrope", "dynamic") else draw(st.sampled_from([None, 4, 12])),
        num_global_key_value_heads=draw(st.none() | st.sampled_from(kv_heads)),
        attention_k_eq_v=k_eq_v,
        value_norm=draw(flags),
        num_kv_shared_layers=shared,
        mlp_layer_types=mlps if "none" in (mlps or ()) else None,
        **linear,
        **mamba,
        attn_output_gate=draw(flags),
        hidden_size_per_layer_input=draw(st.sampled_from([None, None, None, 5])),
        layer_scalar=draw(flags),
        hidden_size=draw(st.sampled_from([16, 17, 24])),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=head_dim,
        num_key_value_heads=draw(st.sampled_from(kv_heads)),
        intermediate_size=draw(st.integers(16, 40)),
        vocab_size=VOCABULARY,
        max_position_embeddings=draw(st.sampled_from([8, LONGEST])) if rope else LONGEST,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-3])),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0])),
        attention_bias=draw(flags),
        mlp_bias=draw(flags),
        tie_word_embeddings=tied,
        head_bias=not tied and draw(flags),
        norm="rms" if rms else draw(st.sampled_from(["layer", "layer_no_bias", "layer_no_weight"])),
        norm_unit_offset=rms and draw(flags),
        hidden_act="silu"
        if swiglu_limit
        else draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid"])),
        norm_placement=placement,
        parallel_residual=parallel,
        shared_norm=parallel and draw(flags),
        positions=positions,
        position_offset=draw(st.integers(0, 2)) if positions in ("learned", "sinusoidal") else 0,
        partial_rotary_factor=share if rope else 1.0,
        rope_scaling=scaling,
        sliding_window=window,
        qk_norm=qk_norm,
        attn_scale=attn_scale,
        floor_scale=attn_scale and 5.0,
        layer_types=types,
        attention_chunk_size=draw(st.integers(1, 6)),
        conv_L_cache=draw(st.integers(1, 4)) if "conv" in (types or ()) else 3,
        conv_bias="conv" in (types or ()) and draw(flags),
        alibi_scaled=positions == "alibi" and draw(flags),
        attention_out_bias=draw(st.none() | flags),
        attn_logit_softcapping=draw(st.none() | st.just(2.0)),
        final_logit_softcapping=draw(st.none() | st.just(3.0)),
        query_pre_attn_scalar=draw(st.none() | st.just(5.0)),
        rope_layers=draw(st.none() | st.lists(flags, min_size=layers, max_size=layers))
        if rope and not shared
        else None,
        rope_local_base_freq=draw(st.none() | st.just(50.0)) if rope and window else None,
        residual_multiplier=draw(st.sampled_from([1.0, 0.6])),
        logits_scaling=draw(st.sampled_from([1.0, 3.0])),
        attention_sinks=draw(flags),
        clip_qkv=draw(st.none() | st.just(0.5)),
        mlp_gated=bool(swiglu_limit) or draw(flags),
        swiglu_limit=swiglu_limit,
        swiglu_alpha=draw(st.sampled_from([1.702, 1.2])) if swiglu_limit else 1.702,
        embedding_norm=draw(flags),
        embedding_multiplier=draw(st.sampled_from([1.0, 4.0])),
    )
