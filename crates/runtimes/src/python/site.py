import os, sys
def link(target=os.environ.get('MPLCONFIGDIR'), made=os.path.join(sys.prefix, 'share', 'matplotlib-cache')):
    if target and target.startswith('/tmp/') and not os.path.isdir(target):
        try:
            os.mkdir(target, 0o700)
            for name in os.listdir(made):
                os.symlink(os.path.join(made, name), os.path.join(target, name))
        except OSError:
            pass
def open_added(added=os.environ.get('SANDPOOL_ADDED')):
    if added and added not in sys.path:
        import site
        site.addsitedir(added)
link()
open_added()
del link, open_added, os, sys
