"""One function a kind of figure. Each takes labelled arrays and returns a matplotlib Figure."""

from .base import use_style
from .fields import by_lag, field_maps, two_readings
from .models import loss_by_prefix, loss_curves
from .modes import eigenvalue_spectra, mode_maps, mode_profiles, reconstruction_error
from .ranks import estimates_by_layer, rank_curves
from .wavelets import dominant_by_layer, scale_spectra, scalogram_panels, transform_check

__all__ = [
    "by_lag",
    "dominant_by_layer",
    "eigenvalue_spectra",
    "estimates_by_layer",
    "field_maps",
    "loss_by_prefix",
    "loss_curves",
    "mode_maps",
    "mode_profiles",
    "rank_curves",
    "reconstruction_error",
    "scale_spectra",
    "scalogram_panels",
    "transform_check",
    "two_readings",
    "use_style",
]
