"""The kernel seam: one folder a vendor, one folder for the contract."""
