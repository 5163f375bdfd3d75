(element, wanted) => {
    const list = element.localName === 'label' && element.control || element;
    if (list.localName !== 'select') throw new sandpool.Failure('not_ready', 'it is not a select; click it and its option');
    if (list.matches(':disabled')) throw new sandpool.Failure('not_ready', 'it is disabled');
    if (wanted.length > 1 && !list.multiple) throw new sandpool.Failure('not_ready', 'it takes one option only');
    const plain = text => text.replace(/\s+/g, ' ').trim();
    const options = [...list.options];
    const chosen = wanted.map(one => options.find(option => option.value === one) ?? options.find(option => plain(option.label) === plain(one)));
    const missing = wanted.filter((one, index) => !chosen[index]);
    if (missing.length) {
        const some = options.slice(0, 20).map(option => plain(option.label).slice(0, 50)).join(', ');
        throw new sandpool.Failure('not_ready', `it has no option ${missing.map(one => one.slice(0, 50)).join(', ')}; it has ${some}`);
    }
    if (chosen.some(option => option.disabled)) throw new sandpool.Failure('not_ready', 'the option is disabled');
    list.focus();
    for (const option of options) option.selected = chosen.includes(option);
    list.dispatchEvent(new Event('input', {bubbles: true, composed: true}));
    list.dispatchEvent(new Event('change', {bubbles: true}));
}
