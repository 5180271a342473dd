"""The case study: Criteo's data, a recommendation model (DLRM), its training, and what its steps cost."""

from lib.dlrm.model import DLRM, Architecture, ModulusHash

__all__ = ["DLRM", "Architecture", "ModulusHash"]
