"""Watch training: `guard` acts on bad steps, `monitor` samples casts."""
