import importlib, importlib.metadata as metadata, importlib.util as util, json
import IPython, PIL, matplotlib.pyplot, matplotlib_inline, noto_cjk_sans_otc, numpy, openpyxl, pandas, requests, scipy.optimize, sympy
for name in ('altair', 'bs4', 'fastparquet', 'html5lib', 'jinja2', 'lxml', 'plotly', 'psycopg2', 'seaborn', 'sklearn', 'tabulate', 'tqdm', 'vl_convert'):
    if util.find_spec(name):
        importlib.import_module(name)
print(json.dumps({d.metadata['Name'].lower(): d.version for d in metadata.distributions()}))
