(element, append, text) => {
    const wrong = what => { throw new sandpool.Failure('not_ready', what); };
    const field = element.localName === 'label' && element.control || element;
    if (field.matches(':disabled')) wrong('it is disabled');
    if (field.readOnly) wrong('it is read-only');
    const active = () => {
        let active = document.activeElement;
        for (let root; (root = active && sandpool.root(active)) && root.activeElement; ) active = root.activeElement;
        return active;
    };
    // The page may pass the focus on to another field, which then gets the text. If the focus does not move at all, the
    // text would go to the wrong field.
    const focus = holder => {
        const before = active();
        holder.focus();
        const now = active();
        if (now !== holder && (now === before || now === document.body)) wrong('it does not take the focus');
    };
    if (field.localName === 'select') wrong('it is a list of options; select one of them');
    if (field.localName === 'input') {
        if (['button', 'checkbox', 'file', 'hidden', 'image', 'radio', 'reset', 'submit'].includes(field.type))
            wrong(`it is a ${field.type} input, not one for text`);
        if (['color', 'date', 'datetime-local', 'month', 'range', 'time', 'week'].includes(field.type)) {
            focus(field);
            field.value = text;
            if (field.value !== text) wrong(`it does not take that text as a ${field.type}`);
            field.dispatchEvent(new Event('input', {bubbles: true, composed: true}));
            field.dispatchEvent(new Event('change', {bubbles: true}));
            return 'set';
        }
    }
    if (field.localName === 'input' || field.localName === 'textarea') {
        focus(field);
        if (!append) return field.select(), field.value === '' ? 'empty' : 'full';
        if (field.selectionEnd === null) return field.value === '' ? 'empty' : 'end';
        field.setSelectionRange(field.value.length, field.value.length);
        return 'empty';
    }
    if (!field.isContentEditable) wrong('it is not a field for text');
    let holder = field;
    while (holder.parentElement?.isContentEditable) holder = holder.parentElement;
    focus(holder);
    const selection = getSelection();
    selection.selectAllChildren(field);
    if (append) selection.collapseToEnd();
    return selection.isCollapsed ? 'empty' : 'full';
}
