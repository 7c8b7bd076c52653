"""Attention fields and attention kernels, measured.

Everything public can be imported from here; a module loads when one of its names is first used.
"""

import sys
import types

import lazy_loader

# Room -> public names. The runner reads this table too, to learn which files a notebook needs.
ROOMS = {
    "attention": [
        "EnergyGatedAttention",
        "SoftmaxAttention",
        "energy_gated_attention",
        "log_energy_gate",
        "softmax_attention",
        "standardize_energy",
    ],
    "bands": ["band_shares", "mode_bands"],
    "bases": ["cosine_basis", "projection_error"],
    "budgets": ["allocate", "model_budget"],
    "capture": [],
    "causal": [],
    "checkpoints": ["load_checkpoint", "save_checkpoint"],
    "claims": ["CLAIMS", "VERDICTS", "claim_results", "claim_row", "claim_table", "ledger"],
    "coherence": ["coherence"],
    "complexity": ["effective_rank", "participation_ratio", "spectral_concentration"],
    "conversion": ["linearize", "lower_rank"],
    "corpus": [
        "CharTokenizer",
        "batches",
        "gpt2_tokenizer",
        "load_text",
        "make_tokenizer",
        "split_tokens",
        "text_hash",
        "windows",
    ],
    "device": ["pick_device"],
    "dynamics": ["embedding_shift", "largest_real", "residual_scale"],
    "ensemble": ["fluctuation", "lag_mean", "lag_rows", "reynolds"],
    "errors": ["InputError"],
    "evaluation": [
        "evaluate",
        "look_ahead",
        "ngram_loss",
        "paired_difference",
        "position_losses",
        "prefix_losses",
        "window_losses",
    ],
    "fetch": ["data_folder"],
    "fields": ["attention_fields", "iter_fields"],
    "filters": ["lag_window"],
    "gpt": ["GPT", "GPTConfig"],
    "graph": [],
    "gram": ["lag_gram", "scale_gram"],
    "healing": ["heal"],
    "heads": [
        "head_overlap",
        "pruning_curve",
        "pruning_losses",
        "share_heads",
        "without_heads",
    ],
    "hub": ["PRETRAINED", "pretrained", "token_windows"],
    "inference": [
        "correlation_interval",
        "early_and_late",
        "mean_interval",
        "over_texts",
        "rank_correlation",
        "trainings_interval",
        "within_slope",
    ],
    "interactions": ["interaction_ranks", "iter_interactions", "position_shares"],
    "kernels": ["head_kernels", "kernel_ranks"],
    "lagmodes": ["profile_features", "row_modes"],
    "linear": ["LinearAttention", "LinearSDAttention", "linear_attention"],
    "nulls": [
        "phase_randomized",
        "planted_fields",
        "shuffled_tokens",
        "structureless_fields",
    ],
    "optimizers": [],
    "plots": [],
    "plans": [],
    "pod": ["pod", "reconstruct", "spectrum", "subspace_overlap"],
    "resampling": ["bootstrap", "contrast", "extrapolate_rank", "rank_curve"],
    "restarts": [],
    "specimens": ["check_specimens", "load_specimen", "make_specimens"],
    "prescription": ["apply", "prescribe"],
    "routing": [
        "hodge",
        "kernel_spectrum",
        "routing_rank",
        "singular_rank",
        "split_interaction",
    ],
    "runner": ["results_folder", "run_notebook", "used_parameters"],
    "runs": [
        "by_model",
        "by_run",
        "every_run",
        "held_out_windows",
        "kept_models",
        "load_runs",
        "run_folder",
        "run_recipe",
        "run_seeds",
        "run_tokenizer",
        "train_all",
        "untrained",
    ],
    "scales": [
        "bootstrap_power",
        "dominant_scales",
        "global_power",
        "mean_period",
        "red_noise",
        "resampled_power",
    ],
    "scalogram": ["scalogram"],
    "sd": ["SDAttention", "sd_attention"],
    "stability": ["half_modes", "split_half"],
    "store": ["load", "provenance", "save", "values_digest"],
    "streaming": ["stream_gram"],
    "surgery": ["keep_routing", "reference_means", "truncate_filtering", "truncate_routing"],
    "texts": ["count_correlations", "strongest_rows", "text_counts", "token_share"],
    "training": ["TrainConfig", "train"],
    "wavelet": ["morlet_cwt", "period_to_scale", "scale_grid", "scale_to_period"],
}

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules={room for room, names in ROOMS.items() if room not in names},
    submod_attrs={room: names for room, names in ROOMS.items() if names},
)


class _Package(types.ModuleType):
    """`attnlib.pod` is the function, also after something has imported the room of that name."""

    def __setattr__(self, name, value):
        if not (isinstance(value, types.ModuleType) and name in ROOMS.get(name, ())):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
