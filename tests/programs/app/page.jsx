export default function Page() {
  return <p>{'made by ' + ['n', 'e', 'x', 't'].join('')}</p>;
}
