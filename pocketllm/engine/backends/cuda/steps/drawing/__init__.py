"""Drawing tokens on the device: what the host asks for, and how it is done."""
