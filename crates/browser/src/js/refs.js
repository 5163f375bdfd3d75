// The first of the scripts that live in an isolated world of every frame: the page can neither see nor change anything here.
// Numbers name nodes. They are given out by the driver, from one counter for all frames and tabs, and never twice.
globalThis.sandpool = (() => {
  // An expando of this world's own wrapper: it keeps the wrapper alive as long as its node, which a WeakMap alone would not.
  const NUMBER = Symbol('number');
  const nodes = new Map();
  const gone = new FinalizationRegistry(number => nodes.delete(number));
  let next = 0;
  let end = 0;

  class Failure extends Error {
    constructor(why, message) {
      super(message);
      this.why = why;
    }
  }

  const number = node => {
    if (node[NUMBER] === undefined) {
      if (next >= end) throw new Failure('not_ready', 'there is too much on it');
      node[NUMBER] = next++;
      nodes.set(node[NUMBER], new WeakRef(node));
      gone.register(node, node[NUMBER]);
    }
    return node[NUMBER];
  };

  // A node of a document that has left its frame is connected for ever: so the frame is asked as well.
  const alive = node => node.isConnected && node.ownerDocument === document && document.defaultView === window;

  const node = number => {
    const node = nodes.get(number)?.deref();
    if (!node || !alive(node)) throw new Failure('stale', 'gone');
    return node;
  };

  const calls = {};
  // One call of the driver; the numbers from `first` to `last` are free.
  const ask = async (first, last, name, ...args) => {
    [next, end] = [first, last];
    try {
      const value = await calls[name](...args);
      return {value, next};
    } catch (error) {
      if (error instanceof Failure) return {why: error.why, message: error.message, next};
      throw error;
    }
  };

  // The parent in the tree as it is laid out: through slots and shadow hosts.
  const parent = node => node.assignedSlot ?? (node.parentNode instanceof ShadowRoot ? node.parentNode.host : node.parentNode);
  const within = (node, ancestor) => {
    while (node && node !== ancestor) node = parent(node);
    return node === ancestor;
  };

  // Closed shadow roots, as far as the driver has shown them to us; null when it found none.
  const shown = new WeakMap();
  calls.show = root => void shown.set(root.host, root);
  const root = element => element.shadowRoot ?? shown.get(element);

  const known = () => nodes.size;

  return {Failure, known, number, node, alive, calls, ask, parent, within, shown, root};
})();
