"""What runs programs: one module a kind of machine, behind the few verbs of `device.Device`."""
