"""Programs on a device: state buffers, steps, and the canary; it schedules nothing."""
