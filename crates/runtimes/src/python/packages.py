import importlib.metadata as metadata, json, sys
print(json.dumps({d.metadata['Name'].lower(): d.version for d in metadata.distributions(path=sys.argv[1:])}))
