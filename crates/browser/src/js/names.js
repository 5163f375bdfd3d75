// Determines the role, the name and the state of an element, from Blink's accessibility tree if it is available and
// otherwise approximately.
{
  const NAME = 200;
  const blink = 'computedRole' in Element.prototype;

  const squeezed = text => text.replace(/\s+/g, ' ').trim();
  sandpool.cuts = 0; // How often a name or a value was shortened.
  const cut = (text, length) => {
    if (text.length <= length) return text;
    sandpool.cuts++;
    return text.slice(0, length - 1) + '…';
  };

  // Makes text of the page harmless: it cannot end its quotes or look like a ref, and characters that reorder or hide text
  // are escaped.
  const plain = text =>
    /^[ -Z\]-~]*$/.test(text) ? text : text
      .replace(/[\u00ad\u200b\u2060\ufeff]/g, '')
      .replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu, c => `\\u{${c.codePointAt(0).toString(16)}}`)
      .replace(/\[ref_/g, '[ref\\_')
      .toWellFormed();
  const quoted = text => `"${plain(text.replace(/[\\"]/g, '\\$&'))}"`;

  // Roles of elements for which Blink has no ARIA role.
  const TAGS = {IFRAME: 'iframe', FRAME: 'iframe', CANVAS: 'canvas', SUMMARY: 'summary', VIDEO: 'video', AUDIO: 'audio', EMBED: 'embed', OBJECT: 'embed'};
  const INPUTS = {checkbox: 'checkbox', radio: 'radio', button: 'button', submit: 'button', reset: 'button', image: 'button', number: 'spinbutton', range: 'slider', search: 'searchbox', file: 'file', color: 'color', date: 'date', time: 'time', month: 'month', week: 'week', 'datetime-local': 'datetime'};
  const GUESSED = {A: 'link', AREA: 'link', BUTTON: 'button', TEXTAREA: 'textbox', OPTION: 'option', IMG: 'image', UL: 'list', OL: 'list', LI: 'listitem', TABLE: 'table', TR: 'row', TD: 'cell', TH: 'columnheader', NAV: 'navigation', MAIN: 'main', HEADER: 'banner', FOOTER: 'contentinfo', ASIDE: 'complementary', ARTICLE: 'article', DIALOG: 'dialog', FIELDSET: 'group', DETAILS: 'group', FORM: 'form', OUTPUT: 'status', PROGRESS: 'progressbar', METER: 'meter', HR: 'separator', FIGURE: 'figure', H1: 'heading', H2: 'heading', H3: 'heading', H4: 'heading', H5: 'heading', H6: 'heading'};

  const guessedRole = element => {
    const said = element.getAttribute('role')?.trim().split(/\s+/)[0];
    if (said && /^[a-z-]{2,30}$/.test(said)) return said;
    if (element.tagName === 'SELECT') return element.multiple || element.size > 1 ? 'listbox' : 'combobox';
    if ((element.tagName === 'A' || element.tagName === 'AREA') && !element.hasAttribute('href')) return '';
    return GUESSED[element.tagName] ?? '';
  };

  // Roles of the most frequent elements, which save a query of Blink unless the element has a `role` or is part of an
  // active element.
  const FIXED = {DIV: '', SPAN: '', P: '', B: '', I: '', STRONG: '', EM: '', BR: '', SLOT: '', LABEL: '', BODY: '', CODE: '', SMALL: '', TBODY: '', THEAD: '', BUTTON: 'button', H1: 'heading', H2: 'heading', H3: 'heading', H4: 'heading', MAIN: 'main', UL: 'list', OL: 'list', TEXTAREA: 'textbox'};

  const role = (element, part) => {
    const tag = element.tagName;
    const fixed = FIXED[tag];
    if (fixed !== undefined && (!part || !fixed) && !element.hasAttribute('role')) return fixed;
    if (TAGS[tag] && (!element.hasAttribute('role') || TAGS[tag] === 'iframe')) return TAGS[tag];
    const own = blink ? element.computedRole : guessedRole(element);
    if (tag === 'INPUT' && element.type === 'file') return 'file';
    if (tag === 'INPUT' && !own) return INPUTS[element.type] ?? 'textbox';
    return own ?? '';
  };

  const FROM_CONTENT = new Set(['button', 'cell', 'checkbox', 'columnheader', 'gridcell', 'heading', 'link', 'menuitem', 'menuitemcheckbox', 'menuitemradio', 'option', 'radio', 'rowheader', 'summary', 'switch', 'tab', 'term', 'tooltip', 'treeitem', 'row']);

  const guessedName = (element, role) => {
    const texts = list => list.map(one => one?.textContent ?? '').join(' ');
    const by = element.getAttribute('aria-labelledby');
    if (by) return texts(by.trim().split(/\s+/).map(id => element.getRootNode().getElementById?.(id)));
    const said = element.getAttribute('aria-label');
    if (said?.trim()) return said;
    if (element.labels?.length) return [...element.labels].map(label => [...label.childNodes].filter(one => one !== element).map(one => one.textContent).join(' ')).join(' ');
    if (element.tagName === 'FIELDSET') return element.querySelector(':scope > legend')?.textContent ?? '';
    if (element.tagName === 'TABLE') return element.caption?.textContent ?? '';
    if (element.tagName === 'INPUT' && INPUTS[element.type] === 'button') return element.value || element.alt || element.type;
    return element.alt || (FROM_CONTENT.has(role) && element.textContent.trim()) || element.title || element.placeholder || '';
  };
  const labelled = element => element.hasAttribute('aria-label') || element.hasAttribute('aria-labelledby');
  // Roles of elements that have a name only if the page gives them one explicitly.
  const NAMELESS = new Set(['', 'generic', 'alert', 'article', 'banner', 'complementary', 'contentinfo', 'definition', 'form', 'list', 'listitem', 'main', 'navigation', 'row', 'status']);
  const name = (element, role) => {
    if (NAMELESS.has(role) && !labelled(element) && !element.hasAttribute('title')) return '';
    return squeezed((blink ? element.computedName : guessedName(element, role)) || '');
  };

  // Types of inputs whose value is not shown.
  const VALUELESS = new Set(['checkbox', 'radio', 'button', 'submit', 'reset', 'image', 'hidden']);
  // Returns the value of a field. A password is masked.
  const value = (element, role) => {
    if (element.tagName === 'SELECT') return [...element.selectedOptions].map(option => option.label).join(', ');
    if (element.tagName === 'INPUT') {
      if (VALUELESS.has(element.type)) return '';
      if (element.type === 'password') return element.value ? '•••' : '';
      if (element.type === 'file') return [...element.files].map(file => file.name).join(', ');
      return element.value;
    }
    if (element.tagName === 'TEXTAREA') return element.value;
    if (element.tagName === 'PROGRESS') return element.hasAttribute('value') ? String(element.value) : '';
    if (element.tagName === 'METER') return String(element.value);
    return element.ariaValueText ?? element.ariaValueNow ?? '';
  };

  const flag = (value, word) => (value === 'true' ? ' ' + word : '');
  const states = (element, role, focused) => {
    let said = '';
    const tag = element.tagName;
    if (element === focused) said += ' focused';
    if (element.matches(':disabled') || element.ariaDisabled === 'true') said += ' disabled';
    if (tag === 'INPUT' && (element.type === 'checkbox' || element.type === 'radio')) {
      said += element.indeterminate && element.type === 'checkbox' ? ' mixed' : element.checked ? ' checked' : '';
    } else said += element.ariaChecked === 'mixed' ? ' mixed' : flag(element.ariaChecked, 'checked');
    said += element.ariaPressed === 'mixed' ? ' mixed' : flag(element.ariaPressed, 'pressed');
    if (element.ariaSelected === 'true' || (tag === 'OPTION' && element.selected)) said += ' selected';
    const open = tag === 'SUMMARY' && element.parentNode?.tagName === 'DETAILS' ? String(element.parentNode.open) : element.ariaExpanded;
    said += open === 'true' ? ' expanded' : open === 'false' ? ' collapsed' : '';
    if (element.ariaCurrent && element.ariaCurrent !== 'false') said += ' current';
    if (element.required || element.ariaRequired === 'true') said += ' required';
    if (element.ariaReadOnly === 'true' || (element.readOnly && tag !== 'BUTTON')) said += ' readonly';
    if (element.ariaInvalid && element.ariaInvalid !== 'false') said += ' invalid';
    if (element.isContentEditable && !/^(textbox|searchbox|combobox)$/.test(role) && !element.parentElement?.isContentEditable) said += ' editable';
    const holds = value(element, role);
    if (holds) said += ' = ' + quoted(cut(squeezed(holds.slice(0, 4 * NAME)), NAME));
    if (tag === 'SELECT' && role === 'combobox') said += options(element);
    return said;
  };

  // Returns the options of a closed list. They are part of its line because they cannot be clicked individually.
  const options = select => {
    let said = '';
    let count = 0;
    for (const option of select.options) {
      if (said.length > 300) break;
      said += (said ? ' | ' : '') + quoted(cut(squeezed(option.label), 60)) + (option.disabled ? ' disabled' : '');
      count++;
    }
    const more = select.options.length - count;
    if (more) sandpool.cuts++;
    return said && ` of ${said}${more ? ` and ${more} more` : ''}`;
  };

  const HERE = location.origin + '/';
  // Returns the address of a link in a short form, without quotes and spaces.
  const leads = element => {
    if (element.tagName !== 'A' && element.tagName !== 'AREA') return '';
    const href = element.href;
    if (typeof href !== 'string' || !/^(https?|ftp|mailto|tel|file):/.test(href)) return '';
    const short = href.startsWith(HERE) ? href.slice(HERE.length - 1) : href;
    return ' -> ' + cut(plain(short.replace(/[\s"]/g, encodeURIComponent)), 120);
  };

  const level = element => {
    const said = element.ariaLevel || (/^H[1-6]$/.test(element.tagName) ? element.tagName[1] : '');
    return /^[1-9]\d?$/.test(said) ? ' ' + said : '';
  };

  Object.assign(sandpool, {blink, NAME, squeezed, cut, plain, quoted, role, name, labelled, states, leads, level, FROM_CONTENT});
}
