"""Start of a rank's process: `python -m muster.launch.rank_module MODULE …` is `python -m MODULE …`, a fifth faster.

The garbage collector is off while modules are imported: it would walk several times over a million objects, none of
them garbage. `rank_process.member_main` turns it on again, and leaves to it only what is made from then on.
"""

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
