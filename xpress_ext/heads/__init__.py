"""Draft heads that share XPress's face, so that training and evaluation can swap them.

`MarkovHead` and `DominoHead` are the serial rivals of docs/method.md, 8; `NoHead` is the drafter
alone; `xpress_ext.refiner.XPressRefiner` is the fourth. All of them are low-rank corrections,
`logits = base_logits + latent @ readout^T`.
"""

from xpress_ext.heads.domino import DominoConfig, DominoHead
from xpress_ext.heads.markov import MarkovConfig, MarkovHead
from xpress_ext.heads.none import NoHead
from xpress_ext.heads.protocol import DraftHead, InferenceHead, for_inference
from xpress_ext.heads.serial import DecodeOutput, HeadConfig, SerialHead

__all__ = [
    "DecodeOutput",
    "DominoConfig",
    "DominoHead",
    "DraftHead",
    "HeadConfig",
    "InferenceHead",
    "MarkovConfig",
    "MarkovHead",
    "NoHead",
    "SerialHead",
    "for_inference",
]
