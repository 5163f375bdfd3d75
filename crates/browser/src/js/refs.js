// This is the first of the scripts in the isolated world of every frame, which the page can neither see nor change. It
// gives numbers to nodes. The driver reserves the numbers from one counter for all frames and tabs, so none is used twice.
globalThis.sandpool = (() => {
  // The number is a property of the isolated world's wrapper of a node. It keeps the wrapper alive as long as the node,
  // which an entry in a WeakMap would not.
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

  // A node stays connected to its document even after the frame has got another document, so the frame is checked too.
  const alive = node => node.isConnected && node.ownerDocument === document && document.defaultView === window;

  const node = number => {
    const node = nodes.get(number)?.deref();
    if (!node || !alive(node)) throw new Failure('stale', 'gone');
    return node;
  };

  const calls = {};
  // Handles one call of the driver, which has reserved the numbers from `first` up to `last` for it.
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

  // Returns the parent in the layout tree, through slots and shadow hosts.
  const parent = node => node.assignedSlot ?? (node.parentNode instanceof ShadowRoot ? node.parentNode.host : node.parentNode);
  const within = (node, ancestor) => {
    while (node && node !== ancestor) node = parent(node);
    return node === ancestor;
  };

  // Closed shadow roots that the driver has passed in, by their host. The value is null if a host has none.
  const shown = new WeakMap();
  calls.show = root => void shown.set(root.host, root);
  const root = element => element.shadowRoot ?? shown.get(element);

  const known = () => nodes.size;

  return {Failure, known, number, node, alive, calls, ask, parent, within, shown, root};
})();
