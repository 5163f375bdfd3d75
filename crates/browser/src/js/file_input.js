(element, count) => {
    if (element.localName !== 'input' || element.type !== 'file') throw new sandpool.Failure('not_ready', 'it is not a file input');
    if (element.matches(':disabled')) throw new sandpool.Failure('not_ready', 'it is disabled');
    if (count > 1 && !element.multiple) throw new sandpool.Failure('not_ready', 'it takes one file only');
}
