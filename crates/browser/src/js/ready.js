// Whether an element can be acted on, and where. Waits for what may still come, up to the driver's bound.
{
  const {Failure, node, calls, parent, within} = sandpool;
  const frame = () =>
    new Promise(done => {
      const late = setTimeout(done, 50); // a frame that is not painted has no animation frames
      requestAnimationFrame(() => (clearTimeout(late), done()));
    });

  const describe = element => {
    if (!element) return 'nothing that can be clicked';
    const id = element.id ? '#' + element.id : '';
    const kind = typeof element.className === 'string' ? element.className.trim().split(/\s+/)[0] : '';
    return (element.localName + id + (!id && kind ? '.' + kind : '')).slice(0, 80);
  };

  const disabled = element => {
    if (element.matches(':disabled')) return true;
    for (let up = element; up instanceof Element; up = parent(up)) {
      if (up.ariaDisabled === 'true') return true;
      if (up.inert) return true;
    }
    return false;
  };

  // What a pointer hits there: the innermost element, through shadow roots.
  const hit = (x, y) => {
    let found = document.elementFromPoint(x, y);
    for (let root, deeper; (root = found && sandpool.root(found)) && (deeper = root.elementFromPoint(x, y)) && deeper !== found; ) found = deeper;
    return found;
  };

  const reaches = (element, found) => {
    if (!found) return false;
    if (within(found, element)) return true;
    if (element.labels && [...element.labels].some(label => within(found, label))) return true;
    return getComputedStyle(element).pointerEvents === 'none' && within(element, found);
  };

  // Points to try: the middle of what is to be seen of each of its boxes, then of the quarters of the first.
  const points = element => {
    const boxes = [...element.getClientRects()].slice(0, 8).map(box => ({
      left: Math.max(box.left, 0),
      top: Math.max(box.top, 0),
      right: Math.min(box.right, innerWidth),
      bottom: Math.min(box.bottom, innerHeight),
    }));
    const seen = boxes.filter(box => box.right - box.left >= 1 && box.bottom - box.top >= 1);
    const at = (box, h, v) => ({x: box.left + (box.right - box.left) * h, y: box.top + (box.bottom - box.top) * v});
    const middles = seen.map(box => at(box, 0.5, 0.5));
    const corners = seen.slice(0, 1).flatMap(box => [at(box, 0.2, 0.2), at(box, 0.8, 0.2), at(box, 0.2, 0.8), at(box, 0.8, 0.8)]);
    return [...middles, ...corners];
  };

  // An area with no box of its own is clicked on its picture.
  const boxed = element => (element.localName === 'area' ? document.querySelector(`img[usemap="#${CSS.escape(element.parentElement?.name ?? '')}"]`) : null) ?? element;

  const same = (a, b) => a.x === b.x && a.y === b.y && a.width === b.width && a.height === b.height;

  const look = async (element, need) => {
    if (!sandpool.alive(element)) throw new Failure('stale', 'gone');
    if (need === 'any') return {};
    if (!element.checkVisibility({visibilityProperty: true})) return {reason: 'it is hidden'};
    if (need !== 'seen' && disabled(element)) return {reason: 'it is disabled'};
    if (need === 'type' && element.readOnly) return {reason: 'it is read-only'};
    let box = element.getBoundingClientRect();
    if (box.top < 0 || box.left < 0 || box.bottom > innerHeight || box.right > innerWidth) {
      element.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
      box = element.getBoundingClientRect();
    }
    // What is typed goes to where the focus is, wherever that moves.
    if (need === 'type') return {point: {x: box.x, y: box.y, width: box.width, height: box.height}};
    await frame();
    const now = element.getBoundingClientRect();
    if (!sandpool.alive(element)) throw new Failure('stale', 'gone');
    if (!same(box, now)) return {reason: 'it is moving'};
    if (!now.width && !now.height) return {reason: 'it has no size'};
    const places = points(boxed(element));
    if (!places.length) return {reason: 'it is outside of what can be scrolled to'};
    if (need === 'seen') return {point: {...places[0], width: now.width, height: now.height}};
    const place = places.find(({x, y}) => reaches(boxed(element), hit(x, y)));
    if (!place) return {reason: `it is covered by ${describe(hit(places[0].x, places[0].y))}`};
    return {point: {...place, width: now.width, height: now.height}};
  };

  // Between the look and the click a page may put something else there. What reaches another element is then held back from the page.
  let guard = null;
  const HELD = ['pointerdown', 'mousedown', 'pointerup', 'mouseup', 'click', 'auxclick', 'dblclick', 'contextmenu'];
  const hold = event => {
    if (!guard || !event.isTrusted || performance.now() > guard.end) return;
    if (guard.missed === undefined && /down$/.test(event.type)) {
      const found = event.composedPath()[0];
      const inside = sandpool.shown.get(found) && within(guard.element, found); // events do not tell what is in a closed root
      guard.missed = inside || reaches(guard.element, found) ? null : found;
    }
    if (!guard.missed) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  };
  for (const type of HELD) addEventListener(type, hold, {capture: true, passive: false});

  // After the click: whether it reached what it was meant for.
  calls.hit = () => {
    const missed = guard?.missed;
    guard = null;
    if (missed) throw new Failure('not_ready', `${describe(missed)} came in its place`);
  };

  // `need`: 'click' (what a pointer needs), 'type' (what a keyboard needs), 'seen' (in view), 'any' (there).
  let turn = 0;
  calls.ready = async (number, need, ms) => {
    const end = performance.now() + ms;
    const mine = ++turn; // one that nobody waits for any more gives way to the next
    while (mine === turn) {
      const element = node(number);
      const {reason, point} = await look(element, need);
      if (!reason && mine === turn) {
        guard = need === 'click' ? {element: boxed(element), end: performance.now() + 2000} : null;
        return point ?? {x: 0, y: 0, width: 0, height: 0};
      }
      if (performance.now() >= end) throw new Failure('not_ready', reason);
      await frame();
    }
    throw new Failure('not_ready', 'something else was asked meanwhile');
  };

  // A point of a frame as a point of the document that its element is in.
  calls.through = async (number, x, y, need) => {
    const element = node(number);
    const place = () => {
      const box = element.getBoundingClientRect();
      const scale = element.offsetWidth ? box.width / element.offsetWidth : 1;
      const style = getComputedStyle(element);
      return {
        x: box.left + (element.clientLeft + parseFloat(style.paddingLeft) + x) * scale,
        y: box.top + (element.clientTop + parseFloat(style.paddingTop) + y) * scale,
      };
    };
    if (!element.checkVisibility({visibilityProperty: true})) throw new Failure('not_ready', 'its frame is hidden');
    let point = place();
    if (point.x < 0 || point.y < 0 || point.x >= innerWidth || point.y >= innerHeight) {
      scrollBy({left: point.x - innerWidth / 2, top: point.y - innerHeight / 2, behavior: 'instant'});
      point = place();
    }
    const found = need === 'click' ? hit(point.x, point.y) : element;
    if (found !== element) throw new Failure('not_ready', `its frame is covered by ${describe(found)}`);
    return point;
  };
}
