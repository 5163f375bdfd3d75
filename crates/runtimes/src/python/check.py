import json, importlib.metadata as metadata
import IPython, PIL, matplotlib.pyplot, matplotlib_inline, numpy, openpyxl, pandas, requests, scipy.optimize, sympy
print(json.dumps({d.metadata['Name'].lower(): d.version for d in metadata.distributions()}))
