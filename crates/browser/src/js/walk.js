// Reads the page as lines, in the order in which a user reads it, up to a budget of characters and time. A walk can continue
// where an earlier one stopped. It uses its own stack instead of recursion, however deeply the page is nested.
{
  const {Failure, number, node, alive, calls, parent, shown} = sandpool;
  const {blink, NAME, squeezed, cut, plain, quoted, role, name, labelled, states, leads, level, FROM_CONTENT} = sandpool;

  const TEXT = 4000; // Maximum number of characters of one run of text in the outline.
  const INDENT = 30;
  const CURSORS = 32;
  const SKIPPED = new Set(['SCRIPT', 'STYLE', 'NOSCRIPT', 'TEMPLATE', 'HEAD', 'TITLE', 'META', 'LINK', 'BASE', 'DATALIST', 'title', 'desc', 'defs', 'metadata', 'style', 'script']);
  // Roles of elements that have no line. Their content is read as content of the element around them.
  const CLEAR = new Set(['', 'none', 'generic', 'presentation', 'paragraph', 'rowgroup', 'strong', 'emphasis', 'code', 'mark', 'time', 'subscript', 'superscript', 'insertion', 'deletion', 'caption', 'legend', 'suggestion']);
  const ACTIVE = new Set(['button', 'link', 'textbox', 'searchbox', 'checkbox', 'radio', 'combobox', 'listbox', 'option', 'menuitem', 'menuitemcheckbox', 'menuitemradio', 'slider', 'spinbutton', 'switch', 'tab', 'treeitem', 'scrollbar', 'iframe', 'canvas', 'summary', 'video', 'audio', 'embed', 'file', 'color', 'date', 'time', 'month', 'week', 'datetime']);
  const LEAVES = new Set(['IFRAME', 'FRAME', 'TEXTAREA', 'INPUT', 'CANVAS', 'VIDEO', 'AUDIO', 'OBJECT', 'EMBED', 'PROGRESS', 'METER', 'IMG']);
  // Returns whether the element is the label of another element, whose line shows the text already.
  const NAMING = element => {
    switch (element.tagName) {
      case 'LABEL': return !!element.control?.checkVisibility({visibilityProperty: true});
      case 'LEGEND': return element.parentNode?.tagName === 'FIELDSET';
      case 'CAPTION': return element.parentNode?.tagName === 'TABLE';
    }
    return false;
  };

  // Types of inputs that pages hide and draw by other means. The label is clicked in place of such an input.
  const DRAWN = new Set(['checkbox', 'radio', 'file']);
  const drawn = element => {
    const control = element.tagName === 'LABEL' ? element.control : null;
    return control && DRAWN.has(control.type) && !control.checkVisibility({visibilityProperty: true}) ? control : null;
  };

  const cursors = new Map();
  let lastCursor = 0;
  const keep = (at, before) => {
    cursors.set(++lastCursor, {at: new WeakRef(at), before: before.map(one => new WeakRef(one))});
    cursors.delete(lastCursor - CURSORS);
    return lastCursor;
  };

  const focused = () => {
    let active = document.activeElement;
    for (let root; (root = active && sandpool.root(active)) && root.activeElement; ) active = root.activeElement;
    return active === document.body ? null : active;
  };

  class Walk {
    constructor({budget, ms, base, find, apart, begun}) {
      Object.assign(this, {budget, base, begun});
      this.find = find?.toLowerCase();
      this.end = performance.now() + ms;
      this.lines = []; // Each line is [depth, number or 0, text].
      this.apart = apart != null; // Whether the text of the page is read apart from its elements, up to `apart` characters.
      this.room = apart ?? 0;
      this.texts = [];
      this.textIsCut = false;
      this.shortened = 0;
      this.used = 0;
      this.stack = [];
      this.pending = null; // The last line, to which a text may still be added.
      this.run = ''; // The current run of text.
      this.runAt = null;
      this.recent = []; // The nodes of the last lines.
      this.stop = null;
      this.canvases = 0;
      this.seen = 0;
      this.focused = focused();
      this.owned = new Map();
      for (const owner of document.querySelectorAll('[aria-owns]')) {
        for (const id of owner.getAttribute('aria-owns').trim().split(/\s+/).slice(0, 1000)) {
          const child = document.getElementById(id);
          if (child && child !== owner && !this.owned.has(child) && !child.contains(owner)) this.owned.set(child, owner);
        }
      }
    }

    // Returns the children in the layout tree.
    kids(element) {
      const owned = this.owned.size && element.hasAttribute('aria-owns') ? [...this.owned].filter(([, owner]) => owner === element).map(([child]) => child) : [];
      if (element.tagName === 'SLOT') {
        const assigned = element.assignedNodes();
        if (assigned.length) return {list: assigned, i: 0, at: null};
      }
      if (element.tagName === 'DETAILS' && !element.open) {
        return {list: [...element.children].filter(child => child.tagName === 'SUMMARY').slice(0, 1), i: 0, at: null};
      }
      const root = sandpool.root(element) ?? element;
      if (owned.length) return {list: [...root.childNodes, ...owned], i: 0, at: null};
      return {list: null, root, at: root.firstChild};
    }

    static next(kids) {
      if (kids.list) return kids.list[kids.i++];
      const node = kids.at;
      if (node) kids.at = node.nextSibling;
      return node;
    }

    // Skips the children up to this one.
    static skip(kids, child) {
      if (kids.list) kids.i = kids.list.indexOf(child) + 1;
      else if (child.parentNode === kids.root) kids.at = child.nextSibling;
    }

    // Writes the line of an element, if it has one, and goes on with its children. With `silent`, the line was already
    // written by an earlier walk.
    enter(element, silent) {
      const outer = this.stack.at(-1) ?? {depth: this.base, quiet: false, mute: false, pointer: false, line: null};
      const tag = element.tagName;
      if (SKIPPED.has(tag) || element.ariaHidden === 'true' || element.inert) return;
      if (this.owned.size && this.owned.get(element) && this.owned.get(element) !== outer.element) return;
      const style = getComputedStyle(element);
      const display = style.display;
      if (display === 'none') return;
      if (!silent && tag.includes('-') && this.sealed(element)) return;
      const invisible = style.visibility !== 'visible';
      const is = role(element, outer.active);
      const control = drawn(element);
      let kind = invisible ? '' : control ? control.type : is;
      const pointer = style.cursor === 'pointer';
      if (kind === 'image' && (outer.quiet || !name(element, kind)) && !(element.tabIndex >= 0)) kind = '';
      let inner = {element, kids: null, depth: outer.depth, quiet: outer.quiet || NAMING(element), mute: invisible, pointer, line: outer.line, block: false, breaks: /^pre|^break-spaces/.test(style.whiteSpaceCollapse ?? style.whiteSpace)};
      const reachable = (element.tabIndex >= 0 && tag !== 'BODY' && tag !== 'HTML' && tag !== 'DIALOG') || (element.isContentEditable && !element.parentElement?.isContentEditable);
      const clickable = CLEAR.has(kind) && !outer.active && !inner.quiet && tag !== 'BODY' && tag !== 'HTML' && ((pointer && !outer.pointer) || element.hasAttribute('onclick'));
      if (!invisible && (!CLEAR.has(kind) || reachable || clickable)) {
        if (!silent) this.flush();
        const acts = ACTIVE.has(kind) || reachable || clickable;
        const line = this.line(element, kind || 'generic', acts, outer, inner);
        if (!silent) this.put(line);
        if (this.stop) return;
        inner.depth++;
        inner.line = line;
        inner.active = outer.active || acts;
        if (kind === 'canvas') this.canvases++;
      } else {
        inner.active = outer.active;
        inner.block = !display.startsWith('inline') && display !== 'contents';
        if (inner.block && !silent) this.flush();
      }
      if (this.stop) return;
      if (tag === 'BR' && this.run) this.run = this.apart ? this.run.replace(/ $/, '') + '\n' : this.run + ' ';
      if (LEAVES.has(tag) || (tag === 'SELECT' && is === 'combobox') || style.contentVisibility === 'hidden') return;
      inner.kids = this.kids(element);
      this.stack.push(inner);
    }

    // Stops at a custom element that is visible but seems empty, so that the driver can look for a closed shadow root.
    sealed(element) {
      if (element.shadowRoot || shown.has(element) || element.firstElementChild || element.textContent.trim()) return false;
      const box = element.getBoundingClientRect();
      if (!box.width || !box.height) return false;
      this.flush();
      this.commit();
      if (this.stop) return true;
      shown.set(element, null);
      this.stop = {host: number(element), cursor: keep(element, this.recent), printed: this.printed()};
      return true;
    }

    // Returns whether the element contains only a link or a button, whose line shows the same name.
    static wraps(element) {
      const only = element.childElementCount === 1 ? element.firstElementChild : null;
      if (only?.tagName !== 'A' && only?.tagName !== 'BUTTON') return false;
      for (let node = element.firstChild; node; node = node.nextSibling) if (node !== only && node.nodeType === 3 && node.data.trim()) return false;
      return getComputedStyle(only).display !== 'none' && role(only) !== '';
    }

    line(element, kind, acts, outer, inner) {
      const cuts = sandpool.cuts;
      const content = FROM_CONTENT.has(kind) && !labelled(element);
      let called = content && !acts && Walk.wraps(element) ? '' : name(element, kind);
      if (called && content && element.firstChild) {
        // The content is the name. If it is too long for a name, or belongs to a row, the content is read instead.
        if ((called.length > NAME && !this.apart) || kind === 'row') called = '';
        else inner.quiet = true;
      } else if (called && element.childNodes.length === 1 && element.firstChild.length <= 2 * NAME) {
        inner.quiet = squeezed(element.firstChild.data ?? '') === called;
      }
      const said = called ? ' ' + quoted(cut(called, NAME)) : '';
      const text = kind + (kind === 'heading' ? level(element) : '') + said + states(drawn(element) ?? element, kind, this.focused) + (this.apart ? '' : leads(element));
      return {node: element, depth: outer.depth, number: acts ? number(element) : 0, text, open: !called, up: outer.line, printed: false, shortened: sandpool.cuts !== cuts};
    }

    text(node) {
      const frame = this.stack.at(-1);
      if (frame.mute || (frame.quiet && !this.apart)) return;
      const most = Math.max(this.room, TEXT);
      const length = node.length;
      let text = length > most * 2 ? node.substringData(0, most * 2) : node.data;
      if (!this.run) {
        if (!text.trim()) return;
        [this.runAt, this.runDepth, this.runUp] = [node, frame.depth, frame.line];
        this.more = 0;
      }
      if (this.run.length > most) return void (this.more += text.trim() ? length : 0);
      this.more += length - text.length;
      // Outside of elements such as `pre`, white space is one space, and nothing at the beginning of a line.
      if (this.apart && !frame.breaks) {
        text = text.replace(/\s+/g, ' ');
        if (/\s/.test(this.run.at(-1) ?? ' ')) text = text.trimStart();
      }
      this.run += text;
    }

    // Ends the current run of text and writes it.
    flush() {
      if (!this.run) return;
      if (this.apart) return this.flushApart();
      let text = squeezed(this.run);
      this.run = '';
      if (!text) return;
      if (text.length > TEXT) {
        this.more += text.length - TEXT;
        text = text.slice(0, TEXT);
      }
      const more = this.more ? ` … (${this.more} more characters)` : '';
      const last = this.pending;
      if (last?.open && last.depth + 1 === this.runDepth && last === this.runUp) {
        last.text += ': ' + quoted(text) + more;
        last.open = false;
        return;
      }
      this.put({node: this.runAt, depth: this.runDepth, number: 0, text: quoted(text) + more, open: false, up: this.runUp, printed: false});
    }

    // Ends the current run of text and adds what fits of it to the text of the page. Elements are read further.
    flushApart() {
      const text = this.run.trimEnd().replace(/^\s*\n/, '');
      this.run = '';
      if (!text || (this.find !== undefined && !text.toLowerCase().includes(this.find))) return;
      const fits = text.slice(0, Math.max(Math.min(this.room, this.budget - this.used), 0)).replace(/[\ud800-\udbff]$/, '');
      this.textIsCut ||= this.more > 0 || fits.length < text.length;
      if (!fits) return;
      this.texts.push(fits.split(/([\n\t])/).map((part, at) => (at % 2 ? part : plain(part))).join(''));
      this.room -= fits.length + 1;
      this.used += fits.length + 1;
    }

    put(line) {
      this.commit();
      if (!this.stop) this.pending = line;
    }

    // Writes the pending line if it fits into the budget and matches the search.
    commit() {
      const line = this.pending;
      this.pending = null;
      if (!line || this.stop) return;
      if (this.apart && !line.number) return;
      if (this.find !== undefined && !line.text.toLowerCase().includes(this.find)) return;
      const lines = [];
      for (let up = line; up && !up.printed; up = this.find === undefined || this.apart ? null : up.up) lines.unshift(up);
      const cost = lines.reduce((sum, one) => sum + this.cost(one), 0);
      if (this.used + cost > this.budget) {
        if (this.used || this.begun) return void this.halt(line.node);
        line.text = plain(line.text.slice(0, Math.max(this.budget - line.depth - 14, 0))); // The first line alone exceeds the budget.
        line.shortened = true;
      }
      for (const one of lines) {
        one.printed = true;
        if (one.shortened) this.shortened++;
        this.lines.push([this.indent(one), one.number, one.text]);
      }
      this.used += cost;
      if (this.recent.push(line.node) > 8) this.recent.shift();
    }

    indent(line) {
      return this.apart ? 0 : Math.min(line.depth, INDENT);
    }

    cost(line) {
      return this.indent(line) + (line.number ? 7 + String(line.number).length : 0) + line.text.length + 1;
    }

    halt(at) {
      this.stop ??= {cursor: keep(at, this.recent)};
    }

    // Returns how many of the lines around this position are already written.
    printed() {
      const up = new Set();
      for (const frame of this.stack) if (frame.line?.printed) up.add(frame.line);
      return up.size;
    }

    // Returns to a node and continues at it, inside it or after it. The elements around it are entered again without
    // writing their lines.
    resume(top, at, where, printed) {
      const path = [];
      for (let up = at; up && up !== document; up = this.owned.get(up) ?? parent(up)) {
        path.push(up);
        if (up === top) break;
      }
      path.reverse();
      if (path[0] !== top) throw new Failure('stale', 'gone');
      for (let i = 0; i + 1 < path.length; i++) {
        const depth = this.stack.length;
        this.enter(path[i], true);
        if (this.stack.length === depth) return; // The element was hidden in the meantime.
        Walk.skip(this.stack.at(-1).kids, path[i + 1]);
      }
      const lines = [...new Set(this.stack.map(frame => frame.line).filter(Boolean))];
      for (const line of lines.slice(0, printed)) line.printed = true;
      if (where === 'at') this.visit(at);
      else if (at.nodeType === 1 && (where === 'inside' || at === top)) this.enter(at, true);
    }

    visit(node) {
      if (node.nodeType === 3) return this.text(node);
      if (node.nodeType !== 1) return;
      this.enter(node, false);
      if (!this.stop && (node.tagName === 'IFRAME' || node.tagName === 'FRAME') && this.pending?.node === node) this.frame(node);
    }

    // Stops at a frame. The driver reads its content, and continues after it.
    frame(element) {
      const line = this.pending;
      if (this.find === undefined) this.commit();
      if (this.stop) return;
      const context = [];
      for (let up = line; up && !up.printed; up = up.up) context.unshift([this.indent(up), up.number, up.text]);
      const wanted = this.find === undefined || line.text.toLowerCase().includes(this.find);
      if (this.find !== undefined && wanted) this.commit();
      if (this.stop) return;
      this.pending = null;
      this.stop = {frame: number(element), depth: line.depth + 1, cursor: keep(element, []), printed: this.printed(), context: wanted || this.apart ? [] : context};
    }

    go() {
      while (this.stack.length && !this.stop) {
        const frame = this.stack.at(-1);
        const child = Walk.next(frame.kids);
        if (child) {
          if (++this.seen % 128 === 0 && performance.now() > this.end) {
            this.flush();
            this.commit();
            this.stop ??= {cursor: keep(child, this.recent), late: true, printed: this.printed()};
            return;
          }
          this.visit(child);
          continue;
        }
        if (frame.block || frame.line !== (this.stack.at(-2)?.line ?? null)) this.flush();
        if (this.stop) return;
        this.stack.pop();
      }
      if (this.stop) return;
      this.flush();
      this.commit();
    }
  }

  // Returns the last open modal dialog. Elements outside of it cannot be reached.
  const modal = () => [...document.querySelectorAll(':modal')].at(-1);

  calls.walk = ask => {
    const walk = new Walk(ask);
    const inside = ask.within == null ? modal() : null;
    const top = ask.within == null ? inside ?? document.body ?? document.documentElement : node(ask.within);
    if (ask.cursor != null) {
      const cursor = cursors.get(ask.cursor);
      const at = cursor?.at.deref();
      const before = cursor?.before.map(one => one.deref()).findLast(one => one && alive(one));
      if (at && alive(at)) walk.resume(top, at, ask.after ? 'after' : 'at', ask.printed ?? 0);
      else if (before) walk.resume(top, before, 'inside', ask.printed ?? 0);
      else throw new Failure('stale', 'gone');
    } else if (top) walk.visit(top);
    walk.go();
    const {lines, texts, textIsCut, shortened, used, canvases, stop} = walk;
    return {lines, texts, textIsCut, shortened, used, canvases, stop, blink, modal: !!inside};
  };
}
