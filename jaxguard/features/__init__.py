"""Text in, vectors out: encoders, their fingerprints, and the feature store. Imports no JAX."""

from jaxguard.features.encoder import PRESETS, Encoder, load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore, FeatureStoreError, MissingTexts
from jaxguard.features.texts import TEMPLATE_VERSION, TrajectoryTexts, trajectory_texts

__all__ = [
    "PRESETS",
    "TEMPLATE_VERSION",
    "Encoder",
    "EncoderFingerprint",
    "FeatureStore",
    "FeatureStoreError",
    "MissingTexts",
    "TrajectoryTexts",
    "load_encoder",
    "trajectory_texts",
]
