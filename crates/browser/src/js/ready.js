// Waits, up to the driver's time limit, until an element can be acted on, and determines the point to act at.
{
  const {Failure, node, calls, parent, within} = sandpool;
  const frame = () =>
    new Promise(done => {
      const late = setTimeout(done, 50); // A frame that is not painted has no animation frames.
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

  // Returns the innermost element at a point, through shadow roots.
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

  // Returns the points to try: the middle of the visible part of each box, then points near the corners and the left edge
  // of the first box.
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
    const corners = seen.slice(0, 1).flatMap(box => [[0.2, 0.2], [0.8, 0.2], [0.2, 0.8], [0.8, 0.8], [0.05, 0.5]].map(([h, v]) => at(box, h, v)));
    return [...middles, ...corners];
  };

  // Returns a point inside an area of an image map.
  const inArea = (area, picture) => {
    const box = picture.getBoundingClientRect();
    const numbers = area.coords.split(',').map(parseFloat);
    const mean = first => {
      const all = numbers.filter((_, index) => index % 2 === first);
      return all.reduce((sum, one) => sum + one, 0) / all.length;
    };
    const [x, y] = area.shape === 'circle' ? numbers : area.shape === 'default' ? [picture.offsetWidth / 2, picture.offsetHeight / 2] : [mean(0), mean(1)];
    const scale = picture.offsetWidth ? box.width / picture.offsetWidth : 1;
    return [{x: box.left + x * scale, y: box.top + y * scale}];
  };

  // Returns the element that is visible in place of this one: the picture of an area, or the label of a hidden checkbox.
  const stand = element => {
    if (element.localName === 'area') return document.querySelector(`img[usemap="#${CSS.escape(element.parentElement?.name ?? '')}"]`);
    const box = element.getBoundingClientRect();
    if (visible(element) && (box.width || box.height)) return null;
    return [...(element.labels ?? [])].find(visible);
  };
  const visible = element => element.checkVisibility({visibilityProperty: true});

  // Returns whether a click would go to another control inside the element or its label.
  const taken = (element, found) => {
    const inner = found.closest('a[href], button, input, select, textarea, summary');
    return !!inner && inner !== element && inner !== element.control && !within(element, inner);
  };

  const same = (a, b) => a.x === b.x && a.y === b.y && a.width === b.width && a.height === b.height;

  // Positions to which a covered element is scrolled, one after the other: the cover may be a bar at the top or the bottom
  // of the window, or the edge of a scrolled container.
  const PLACES = ['center', 'end', 'start'];

  const look = async (element, need, moves) => {
    if (!sandpool.alive(element)) throw new Failure('stale', 'gone');
    if (need === 'any') return {};
    const stands = need === 'click' ? stand(element) : null;
    const seen = stands ?? element;
    if (!visible(seen)) return {reason: seen.localName === 'option' ? 'it is in a closed list; select it there' : 'it is hidden'};
    if (need !== 'seen' && disabled(element)) return {reason: 'it is disabled'};
    if (need === 'type' && element.readOnly) return {reason: 'it is read-only'};
    let box = seen.getBoundingClientRect();
    if (box.top < 0 || box.left < 0 || box.bottom > innerHeight || box.right > innerWidth) {
      // An element that was scrolled away from a cover stays where it is.
      if (!moves.count) seen.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
      box = seen.getBoundingClientRect();
    }
    // Typed text goes to the focused element, wherever that moves.
    if (need === 'type') return {point: {x: box.x, y: box.y, width: box.width, height: box.height}};
    await frame();
    const now = seen.getBoundingClientRect();
    if (!sandpool.alive(element)) throw new Failure('stale', 'gone');
    if (!same(box, now)) return {reason: 'it is moving'};
    if (!now.width && !now.height) return {reason: 'it has no size'};
    const area = element.localName === 'area';
    const places = area && stands ? inArea(element, stands) : points(seen);
    if (!places.length) return {reason: 'it is outside of what can be scrolled to'};
    if (need === 'seen') return {point: {...places[0], width: now.width, height: now.height}};
    const target = area ? element : seen;
    const reached = places.filter(({x, y}) => reaches(target, hit(x, y)));
    const place = reached.find(({x, y}) => !taken(target, hit(x, y))) ?? (seen.localName === 'label' ? null : reached[0]);
    if (!place) {
      const cover = describe(hit(places[0].x, places[0].y));
      if (moves.count < PLACES.length) seen.scrollIntoView({block: PLACES[moves.count++], inline: 'center', behavior: 'instant'});
      return {reason: `it is covered by ${cover}`};
    }
    return {point: {...place, width: now.width, height: now.height}, target};
  };

  // Between the check and the click, the page may put another element at the point. The guard keeps the events that reach
  // another element from the page.
  let guard = null;
  const GUARDED = 60000; // A busy page may handle a click only after a long time.
  const HELD = ['pointerdown', 'mousedown', 'pointerup', 'mouseup', 'click', 'auxclick', 'dblclick', 'contextmenu'];
  const hold = event => {
    if (!guard || !event.isTrusted || performance.now() > guard.end) return;
    if (event.type === 'click' && event.detail === 0) return; // A key caused the click.
    if (guard.missed === undefined && /down$/.test(event.type)) {
      const found = event.composedPath()[0];
      const inside = sandpool.shown.get(found) && within(guard.element, found); // The path of an event does not contain nodes of a closed root.
      guard.missed = inside || reaches(guard.element, found) ? null : found;
    }
    if (!guard.missed) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  };
  for (const type of HELD) addEventListener(type, hold, {capture: true, passive: false});

  // Records whether the pointer has come to this document since the element was found ready.
  addEventListener('pointermove', event => { if (guard && event.isTrusted) guard.felt = true; }, {capture: true, passive: true});
  calls.felt = () => !!guard?.felt;

  // Checks, after the click, that it reached the element.
  calls.hit = () => {
    const missed = guard?.missed;
    guard = null;
    if (missed) throw new Failure('not_ready', `${describe(missed)} came in its place`);
  };

  // Waits until the element meets `need`, which is the word of a `Need` of the driver.
  let turn = 0;
  calls.ready = async (number, need, ms) => {
    const end = performance.now() + ms;
    const moves = {count: 0};
    guard = null;
    const mine = ++turn; // An abandoned call ends when the next one begins.
    while (mine === turn) {
      const element = node(number);
      const {reason, point, target} = await look(element, need, moves);
      if (!reason && mine === turn) {
        guard = need === 'click' ? {element: target, end: performance.now() + GUARDED} : null;
        return point ?? {x: 0, y: 0, width: 0, height: 0};
      }
      if (performance.now() >= end) throw new Failure('not_ready', reason);
      await frame();
    }
    throw new Failure('not_ready', 'something else was asked meanwhile');
  };

  // Converts a point in a frame to a point in the document around the frame.
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
    const look = () => (need === 'click' ? hit(point.x, point.y) : element);
    let found = look();
    if (point.x < 0 || point.y < 0 || point.x >= innerWidth || point.y >= innerHeight || found !== element) {
      scrollBy({left: point.x - innerWidth / 2, top: point.y - innerHeight / 2, behavior: 'instant'});
      point = place();
      found = look();
    }
    if (found !== element) throw new Failure('not_ready', `its frame is covered by ${describe(found)}`);
    return point;
  };
}
