"""The case study: Criteo's data, a recommendation model (DLRM), its training, and what its steps cost."""
