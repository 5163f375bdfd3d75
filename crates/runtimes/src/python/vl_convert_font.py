

# Added by `sandpool setup`: a font for Chinese, Japanese and Korean.
register_font_directory(__file__.rsplit('/', 2)[0] + '/noto_cjk_sans_otc')
