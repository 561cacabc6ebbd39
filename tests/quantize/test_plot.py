"""The plot of errors by layer."""

from mlxlm.quantize import PLOT_FILE, quantize


def test_plot_of_a_family_with_other_file_names(write_model, tmp_path, plots):
    neox = {
        "model_type": "gpt_neox", "norm": "layer", "parallel_residual": True, "mlp_gated": False, "hidden_act": "gelu",
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
        "intermediate_size": 256,
    }  # fmt: skip
    write_model(tmp_path / "source", **neox)
    report = quantize(tmp_path / "source", tmp_path / "out", evaluate=False)
    assert "model.h.0.attention.query_key_value" in report.formats
    assert (tmp_path / "out" / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
