// Finds elements by the targets that people write beside CSS selectors: `text=Go`, `"Go"`, `button "Go"`,
// `role=button[name="Go"]`, `:has-text("Go")`, XPath, and chains of these with `>>`.
{
  const {Failure, number, calls, roots} = sandpool;
  const {squeezed, cut, plain, quoted, role, name} = sandpool;

  const TIME = 2000; // Maximum time of a search in ms. The page determines how much there is to search.
  const FOUND = 1000; // Maximum number of elements that a search finds.
  const CANDIDATES = 5; // Maximum number of elements that an explanation names.
  const NAMED = 60; // Maximum length of a name in an explanation.
  const SKIPPED = new Set(['script', 'style', 'noscript', 'template', 'head', 'title']);

  // An element that the page has named like a method hides that method of the document or of its form. The methods of the
  // prototypes are those of this isolated world.
  const {apply} = Reflect;
  const getter = (type, key) => {
    const {get} = Object.getOwnPropertyDescriptor(type.prototype, key);
    return node => apply(get, node, []);
  };
  const method = (type, key) => {
    const own = type.prototype[key];
    return (node, ...args) => apply(own, node, args);
  };
  const content = getter(Node, 'textContent');
  const parentElement = getter(Node, 'parentElement');
  const contains = method(Node, 'contains');
  const firstChild = {element: getter(Element, 'firstElementChild'), document: getter(Document, 'firstElementChild'), fragment: getter(DocumentFragment, 'firstElementChild')};
  const next = getter(Element, 'nextElementSibling');
  const previous = getter(Element, 'previousElementSibling');
  const localName = getter(Element, 'localName');
  const attribute = method(Element, 'getAttribute');
  const matches = method(Element, 'matches');
  const checkVisibility = method(Element, 'checkVisibility');
  const select = {element: method(Element, 'querySelectorAll'), document: method(Document, 'querySelectorAll'), fragment: method(DocumentFragment, 'querySelectorAll')};
  const evaluate = method(Document, 'evaluate');
  const treeWalker = method(Document, 'createTreeWalker');

  const kindOf = root => (root instanceof Element ? 'element' : root instanceof Document ? 'document' : 'fragment');
  const visible = element => checkVisibility(element, {visibilityProperty: true});
  const invalid = message => new Failure('invalid', message);

  let end = 0;
  const check = () => {
    if (performance.now() > end) throw new Failure('not_ready', 'the page is too large for this search; name the element by a ref or a CSS selector');
  };

  const css = (root, selector) => {
    try {
      return [...select[kindOf(root)](root, selector)];
    } catch (error) {
      throw invalid(error.message);
    }
  };

  const xpath = (root, expression) => {
    const scoped = root instanceof Element && /^\(*\//.test(expression) ? expression.replace(/^\(*/, '$&.') : expression;
    let result;
    try {
      result = evaluate(document, scoped, root, null, XPathResult.ORDERED_NODE_SNAPSHOT_TYPE, null);
    } catch {
      throw invalid(`\`${plain(cut(expression, 120))}\` is not an XPath expression that selects elements`);
    }
    const found = [];
    for (let i = 0; i < result.snapshotLength && found.length < FOUND; i++) {
      const node = result.snapshotItem(i);
      if (node instanceof Element) found.push(node);
    }
    return found;
  };

  // Splits a text at a separator outside of quotes and brackets.
  const split = (text, separator) => {
    const parts = [];
    let [depth, quote, start] = [0, '', 0];
    for (let i = 0; i < text.length; i++) {
      const c = text[i];
      if (c === '\\') i++;
      else if (quote) quote = c === quote ? '' : quote;
      else if (c === '"' || c === "'") quote = c;
      else if (c === '(' || c === '[') depth++;
      else if (c === ')' || c === ']') depth--;
      else if (!depth && text.startsWith(separator, i)) {
        parts.push(text.slice(start, i));
        start = i + separator.length;
        i = start - 1;
      }
    }
    return [...parts, text.slice(start)].map(part => part.trim());
  };

  // Returns the position of the bracket that closes the one before `from`, or -1.
  const closing = (text, from) => {
    let [depth, quote] = [1, ''];
    for (let i = from; i < text.length; i++) {
      const c = text[i];
      if (c === '\\') i++;
      else if (quote) quote = c === quote ? '' : quote;
      else if (c === '"' || c === "'") quote = c;
      else if (c === '(') depth++;
      else if (c === ')' && --depth === 0) return i;
    }
    // The quote is an apostrophe.
    return quote ? text.indexOf(')', from) : -1;
  };

  const QUOTED = /^(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')$/;
  // Returns the text in quotes, or null if the text is not in quotes.
  const inQuotes = text => {
    const found = QUOTED.exec(text.trim());
    return found && (found[1] ?? found[2]).replace(/\\(.)/g, '$1');
  };

  const BUTTONS = 'input[type=button i], input[type=submit i], input[type=reset i]';
  const UNREAD = [...SKIPPED].join();
  // Returns the text that a user reads in an element. That of a button that is an input is its value.
  const said = element => {
    if (matches(element, BUTTONS)) return squeezed(attribute(element, 'value') ?? '');
    if (!select.element(element, UNREAD).length) return squeezed(content(element));
    let text = '';
    const walker = treeWalker(document, element, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); ) if (!SKIPPED.has(localName(parentElement(node)))) text += node.data;
    return squeezed(text);
  };
  const called = element => {
    // Elements that hide methods of their form have no name.
    try {
      return name(element, role(element));
    } catch {
      return '';
    }
  };
  const roleOf = element => {
    try {
      return role(element);
    } catch {
      return '';
    }
  };

  // Degrees of agreement of a text with the wanted one, the best first.
  const LIKE = [
    (text, wanted) => text === wanted,
    (text, wanted) => text.toLowerCase() === wanted.toLowerCase(),
    (text, wanted) => text.toLowerCase().includes(wanted.toLowerCase()),
  ];
  // Returns the elements that agree best, of those that can be seen if there are any.
  const best = (elements, text, wanted, degrees) => {
    const seen = elements.filter(visible);
    for (const from of seen.length ? [seen, elements] : [elements]) {
      for (const like of LIKE.slice(0, degrees)) {
        const found = from.filter(element => like(text(element), wanted));
        if (found.length) return found;
      }
    }
    return [];
  };

  // Calls `visit` for every element below the root, in document order, until it returns true.
  const everyElement = (root, visit) => {
    const stack = [firstChild[kindOf(root)](root)];
    while (stack.length) {
      const element = stack.pop();
      if (!element) continue;
      check();
      if (visit(element)) return;
      stack.push(next(element), SKIPPED.has(localName(element)) ? null : firstChild.element(element));
    }
  };

  // Returns the innermost elements whose text contains the wanted one.
  const smallest = (root, wanted) => {
    const lower = wanted.toLowerCase();
    const has = text => squeezed(text).toLowerCase().includes(lower);
    const holds = element => !SKIPPED.has(localName(element)) && has(content(element));
    // The values of buttons are not part of the text around them.
    const found = css(root, BUTTONS).slice(0, FOUND).filter(button => has(said(button)));
    const stack = [root];
    while (stack.length && found.length < FOUND) {
      const at = stack.pop();
      const inner = [];
      for (let child = firstChild[kindOf(at)](at); child; child = next(child)) {
        check();
        if (holds(child)) inner.push(child);
      }
      if (!inner.length && at !== root && has(said(at))) found.push(at);
      while (inner.length) stack.push(inner.pop());
    }
    return found;
  };

  const ACTIVE = 'a[href], area[href], button, input, select, textarea, summary, label, option, [onclick], [tabindex], [contenteditable], [role=button], [role=link], [role=menuitem], [role=tab], [role=option], [role=checkbox], [role=radio], [role=switch]';
  const active = element => {
    for (let up = element; up; up = parentElement(up)) if (matches(up, ACTIVE)) return true;
    return false;
  };
  // Of elements with the same text, those that a user can act on are meant.
  const acting = elements => {
    const found = elements.length > 1 ? elements.filter(active) : [];
    return found.length ? found : elements;
  };

  const byText = (root, wanted, degrees) => acting(best(smallest(root, wanted), said, wanted, degrees));

  const byName = (root, wanted, degrees) => {
    const found = [];
    everyElement(root, element => matches(element, ACTIVE) && called(element) && found.push(element) >= FOUND);
    return best(found, called, wanted, degrees);
  };

  const ALIASES = {img: 'image', input: 'textbox', field: 'textbox', select: 'combobox', dropdown: 'combobox', a: 'link'};
  const byRole = (root, wanted) => {
    const found = [];
    const meant = Object.hasOwn(ALIASES, wanted) ? ALIASES[wanted] : wanted;
    everyElement(root, element => {
      const is = roleOf(element);
      return (is === meant || is === wanted) && found.push(element) >= FOUND;
    });
    return found;
  };

  const TESTS = {
    'has-text': (element, text) => LIKE[2](said(element), text),
    contains: (element, text) => LIKE[2](said(element), text),
    text: (element, text) => LIKE[2](said(element), text),
    'text-is': (element, text) => LIKE[0](said(element), text),
    visible,
  };
  const TEST = /:(?:(has-text|text-is|text|contains)\(|visible(?![\w-]))/y;
  const hasTests = text => /:(has-text|text-is|text|contains)\(|:visible(?![\w-])/.test(text);

  // Parses one selector of a list: compounds, each with the combinator before it and the tests that CSS does not have.
  const parseSelector = text => {
    const steps = [];
    let [compound, tests, combinator, depth, quote] = ['', [], ' ', 0, ''];
    const finish = () => {
      if (!compound && !tests.length) return;
      steps.push({combinator, compound: compound || '*', tests});
      [compound, tests, combinator] = ['', [], ' '];
    };
    for (let i = 0; i < text.length; i++) {
      const c = text[i];
      TEST.lastIndex = i;
      const test = c === ':' && !depth && !quote && TEST.exec(text);
      if (test) {
        i += test[0].length - 1;
        let argument = '';
        if (test[1]) {
          const close = closing(text, i + 1);
          if (close < 0) throw invalid(`\`:${test[1]}(\` is not closed`);
          argument = text.slice(i + 1, close);
          i = close;
        }
        tests.push({kind: test[1] ?? 'visible', text: squeezed(inQuotes(argument) ?? argument)});
      } else if (c === '\\') {
        compound += c + (text[++i] ?? '');
      } else if (!depth && !quote && /[\s>+~]/.test(c)) {
        finish();
        if (/[>+~]/.test(c)) combinator = c;
      } else {
        if (quote) quote = c === quote ? '' : quote;
        else if (c === '"' || c === "'") quote = c;
        else if (c === '(' || c === '[') depth++;
        else if (c === ')' || c === ']') depth--;
        compound += c;
      }
    }
    finish();
    if (!steps.length || combinator !== ' ') throw invalid('a selector is empty, or ends with a combinator');
    return steps;
  };

  // Returns whether the element fits the selector up to step `last`.
  const fits = (element, steps, last) => {
    check();
    const {compound, tests, combinator} = steps[last];
    if (!matches(element, compound) || !tests.every(({kind, text}) => TESTS[kind](element, text))) return false;
    if (last === 0) return true;
    const [step, many] = {'>': [parentElement, false], '+': [previous, false], '~': [previous, true], ' ': [parentElement, true]}[combinator];
    for (let other = step(element); other; other = step(other)) {
      if (fits(other, steps, last - 1)) return true;
      if (!many) break;
    }
    return false;
  };

  const bySelector = (root, text) => {
    if (!hasTests(text)) return css(root, text);
    const found = new Set();
    for (const one of split(text, ',')) {
      if (!hasTests(one)) {
        for (const element of css(root, one)) found.add(element);
        continue;
      }
      const steps = parseSelector(one);
      const last = steps.length - 1;
      let fitting;
      try {
        fitting = css(root, steps[last].compound).filter(element => fits(element, steps, last));
      } catch (error) {
        throw error instanceof Failure ? error : invalid(error.message);
      }
      // An element has the text of what is in it, so the innermost one is meant.
      if (steps[last].tests.some(test => test.kind !== 'visible')) {
        fitting = fitting.filter((element, i) => i + 1 === fitting.length || !contains(element, fitting[i + 1]));
      }
      for (const element of fitting) found.add(element);
    }
    return [...found];
  };

  // Parses one part of a target: how to search, and the wanted role and text for an explanation.
  const parsePart = part => {
    const [, key, rest] = /^(xpath|css|text|role|id|nth)\s*=\s*([^]*)$/.exec(part) ?? [];
    if (key === 'xpath' || (!key && /^(\(*\/|\.\.?\/)/.test(part))) return {search: root => xpath(root, rest ?? part)};
    if (key === 'css') return {search: root => bySelector(root, rest)};
    if (key === 'id') return {search: root => css(root, `#${CSS.escape(rest)}`)};
    if (key === 'nth') {
      if (!/^-?\d{1,6}$/.test(rest)) throw invalid('`nth=` takes a number, from 0');
      return {nth: Number(rest)};
    }
    if (key === 'text' || (!key && inQuotes(part) !== null)) {
      const exact = inQuotes(rest ?? part);
      const wanted = squeezed(exact ?? rest);
      if (!wanted) throw invalid('the text of the target is empty');
      const degrees = exact === null ? 3 : 2;
      const search = root => {
        const found = byText(root, wanted, degrees);
        return found.length ? found : byName(root, wanted, degrees);
      };
      return {search, wanted};
    }
    const line = !key && /^([a-z]+)(?:\s+\d+)?\s+("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')/i.exec(part);
    const byRoleAndName = line ? [line[1], line[2]] : key === 'role' ? /^([a-z]+)\s*(?:\[\s*name\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\]"']*?)\s*i?\s*\])?$/i.exec(rest)?.slice(1) : null;
    if (key === 'role' && !byRoleAndName) throw invalid('write a role as `role=button[name="Go"]` or `button "Go"`');
    if (byRoleAndName) {
      const is = byRoleAndName[0].toLowerCase();
      const wanted = byRoleAndName[1] === undefined ? '' : squeezed(inQuotes(byRoleAndName[1]) ?? byRoleAndName[1]);
      const search = root => {
        const found = byRole(root, is);
        return wanted ? best(found, called, wanted, 3) : found;
      };
      return {search, wanted, is};
    }
    return {search: root => bySelector(root, part), wanted: /^[\p{L}\p{N}\s'’!?.,-]+$/u.test(part) ? squeezed(part) : ''};
  };

  const below = function* (root) {
    yield root;
    yield* roots(root);
  };

  // Returns a line that names the element, such as `[ref_3] button "Go"`.
  const line = element => {
    const is = roleOf(element) || plain(cut(localName(element), 30));
    const text = called(element) || said(element);
    return `[ref_${number(element)}] ${is}${text ? ' ' + quoted(cut(text, NAMED)) : ''}`;
  };

  // Returns elements that may be meant by a target that matches none.
  const similar = ({wanted, is}) => {
    const words = (wanted ?? '').toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(word => word.length > 1);
    if (!words.length && !is) return [];
    const [alike, others] = [[], []];
    try {
      for (const root of below(document)) {
        everyElement(root, element => {
          if (is ? roleOf(element) !== is && !matches(element, ACTIVE) : !matches(element, ACTIVE)) return false;
          if (!visible(element)) return false;
          const text = called(element).toLowerCase();
          if (words.some(word => text.includes(word))) alike.push(element);
          else if (is && roleOf(element) === is && others.length < CANDIDATES) others.push(element);
          return alike.length >= CANDIDATES;
        });
      }
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
    }
    return [...alike, ...others].slice(0, CANDIDATES);
  };

  // Finds the elements that a target matches. Returns their count, the number of the first, and if it is not the only one,
  // lines that name the ones that may be meant.
  calls.find = target => {
    end = performance.now() + TIME;
    const parts = split(target, '>>').map(parsePart);
    let found = null;
    for (const {search, nth} of parts) {
      if (nth !== undefined) {
        found = [(found ?? []).at(nth)].filter(Boolean);
        continue;
      }
      const all = new Set();
      for (const root of found ?? [document]) {
        // What a shadow root contains counts only if there is nothing in the document itself.
        for (const inner of below(root)) {
          for (const element of search(inner)) all.add(element);
          if (inner === root && all.size) break;
        }
      }
      found = [...all];
    }
    const candidates = found.length === 1 ? [] : found.length ? found.slice(0, CANDIDATES) : similar(parts.at(-1));
    return {count: found.length, number: found[0] && number(found[0]), candidates: candidates.map(line)};
  };
}
