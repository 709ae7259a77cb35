"""A backend in one line each: the same prompts through both pools.

python examples/compose_backend.py [CHECKPOINT_FOLDER]
"""

import sys

import dsv4

checkpoint = sys.argv[1] if len(sys.argv) > 1 else "tiny"
for pool_type in (dsv4.UnifiedPoolConfig, dsv4.ThreePoolConfig):
    pool = pool_type(max_requests=4, max_context=4096, row_format="fp8")
    backend = dsv4.BackendConfig(pool=pool, kernels="auto", deterministic=True)
    model = dsv4.load(checkpoint, backend=backend, device="cpu")
    engine = dsv4.Engine(model)
    for completion in engine.generate(["def main():", "import os\n"], max_new_tokens=48):
        print(pool_type.__name__, repr(completion.text))
