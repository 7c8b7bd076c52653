"""One function a kind of figure. Each takes labelled arrays and returns a matplotlib Figure."""

from .acting import cost_curves, cost_frontiers, increase_by_variant, plan_stacks
from .base import line_panels, use_style
from .coherence import coherence_maps, coherence_shares
from .fields import by_lag, field_maps, two_readings
from .heads import (
    allocation_losses,
    head_numbers,
    head_ranks,
    head_worth,
    pruning_curves,
    rank_against_worth,
)
from .ledger import verdict_counts
from .models import loss_by_prefix, loss_curves
from .modes import (
    basis_errors,
    continuous_spectra,
    eigenvalue_panels,
    eigenvalue_spectra,
    mode_maps,
    reconstruction_error,
    stability_curves,
)
from .ranks import estimates_by_layer, rank_curves
from .routing import eigenvalue_planes, heads_by_layer, routing_on_text, trimming_curves
from .text import attention_on_text
from .wavelets import (
    dominant_by_layer,
    scale_spectra,
    scalogram_panels,
    transform_check,
    window_banks,
)

__all__ = [
    "allocation_losses",
    "attention_on_text",
    "basis_errors",
    "by_lag",
    "coherence_maps",
    "coherence_shares",
    "continuous_spectra",
    "cost_curves",
    "cost_frontiers",
    "dominant_by_layer",
    "eigenvalue_panels",
    "eigenvalue_planes",
    "eigenvalue_spectra",
    "estimates_by_layer",
    "field_maps",
    "head_numbers",
    "head_ranks",
    "head_worth",
    "heads_by_layer",
    "increase_by_variant",
    "line_panels",
    "loss_by_prefix",
    "loss_curves",
    "mode_maps",
    "plan_stacks",
    "pruning_curves",
    "rank_against_worth",
    "rank_curves",
    "reconstruction_error",
    "routing_on_text",
    "scale_spectra",
    "scalogram_panels",
    "stability_curves",
    "transform_check",
    "trimming_curves",
    "two_readings",
    "use_style",
    "verdict_counts",
    "window_banks",
]
