"""Makes features on disk, slowly: run by ``test_feature_cache.py`` in processes that are killed or run together."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

from dflash_lightning.data.features.shards import FeatureShards

if __name__ == "__main__":
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    store, target, spec, settings = pickle.loads((folder / "what.pickle").read_bytes())
    features = target.features

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return features(*args, **kwargs)

    target.features = slowly
    FeatureShards(store, target, spec, root=folder / "features", **settings).build()
