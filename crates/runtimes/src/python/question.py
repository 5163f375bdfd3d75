import importlib.util as util, json, os, sys
print(json.dumps({
    'version': sys.version_info[:3], 'implementation': sys.implementation.name,
    'base': os.path.realpath(getattr(sys, '_base_executable', None) or sys.executable), 'prefix': sys.base_prefix,
    'ensurepip': util.find_spec('ensurepip') is not None, 'pip': util.find_spec('pip') is not None,
}))
