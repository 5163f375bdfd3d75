

# Added by `sandpool setup`: a last font for Chinese, Japanese and Korean, after all that were asked for.
def _with_fallback(find, fallback=FontPath(
        os.path.join(os.path.dirname(os.path.dirname(__file__)), 'noto_cjk_sans_otc', 'NotoSansCJK-Regular.ttc'), 2)):
    def _find_fonts_by_props(self, prop, fontext='ttf', *args, **kwargs):
        found = find(self, prop, fontext, *args, **kwargs)
        return found if fontext == 'afm' or fallback in found else [*found, fallback]
    return _find_fonts_by_props


FontManager._find_fonts_by_props = _with_fallback(FontManager._find_fonts_by_props)
del _with_fallback
