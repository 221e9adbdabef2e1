"""A scripted engine that misbehaves on demand: one flag per fault. Only the standard library, no code of ours."""
