// Numbers and times in words.
const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
export const whole = (n) => grouped.format(n);
export function short(n) {
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toFixed(2) + 'G';
  if (a >= 1e6) return (n / 1e6).toFixed(2) + 'M';
  if (a >= 1e4) return (n / 1e3).toFixed(0) + 'k';
  if (a >= 1e3) return (n / 1e3).toFixed(1) + 'k';
  return n.toFixed(a > 0 && a < 10 ? 1 : 0);
}
export const percent = (s, digits = 0) => (100 * s).toFixed(digits) + ' %';
export const inMs = (ms) => (ms >= 10000 ? [(ms / 1000).toFixed(1), 's'] : ms >= 1000 ? [(ms / 1000).toFixed(2), 's'] : [ms.toFixed(ms < 100 ? 1 : 0), 'ms']);
export function span(s) {
  if (s < 60) return s.toFixed(s < 10 ? 1 : 0) + ' s';
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
export const clock = (ms) => { const d = new Date(ms); return [d.getHours(), d.getMinutes(), d.getSeconds()].map((n) => String(n).padStart(2, '0')).join(':'); };

// dated is a time of day, with the day before it where that is not today.
export const dated = (ms, now) => { const day = new Date(ms).toDateString(); return (day === new Date(now).toDateString() ? '' : day.slice(4, 10) + ' ') + clock(ms); };

// nice rounds a largest value up to one that reads well.
export function nice(v, steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]) {
  if (v <= 0) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return (steps.find((m) => m * p >= v) || 10) * p;
}
