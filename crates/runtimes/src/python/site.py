import os
def link(target=os.environ.get('MPLCONFIGDIR'), made=os.path.join(__import__('sys').prefix, 'share', 'matplotlib-cache')):
    if target and target.startswith('/tmp/') and not os.path.isdir(target):
        try:
            os.mkdir(target, 0o700)
            for name in os.listdir(made):
                os.symlink(os.path.join(made, name), os.path.join(target, name))
        except OSError:
            pass
link()
del link, os
