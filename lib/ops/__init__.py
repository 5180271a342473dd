"""The kernels: one file per op, on the shared _host.py and _device.py. `make copy` writes one to take along."""
