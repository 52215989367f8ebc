package policy

import (
	"math"
	"math/bits"
)

// redrawEvery is for how many tokens an end that was drawn is kept. More often
// brings nothing but work, more rarely costs balance on heavy tails (algorithm 6.1).
const redrawEvery = 4

// draws are the sampled ends of requests, as the ages at which they finish. A
// request's draws are spread evenly over the distribution of its ends and are
// the same at every tick until it outlives one of them: what changes between two
// ticks then is the world, not the dice. They depend on nothing but the table,
// the id and the age, so that a recorded round can be decided again.
type draws struct {
	n       int
	outlook Outlook
	keyed   Keyed // nil: by age alone
	version uint64

	made []drawn // by slot
	ends []int32 // by slot, n each
	own  []int32 // of a request without a slot
}

// drawn says for which ages the ends of a slot hold.
type drawn struct {
	id    uint64
	from  int32
	valid uint32 // ages from `from` on; 0 = none
}

// mostSlots bounds the cache by slot: beyond it we draw every time.
const mostSlots = 1 << 20

func (d *draws) resolve(n int, o Outlook, keyed bool) {
	d.outlook, d.keyed = o, nil
	if k, ok := o.(Keyed); ok && keyed {
		d.keyed = k
	}
	if v := o.Version(); n != d.n || v != d.version {
		d.n, d.version = n, v
		clear(d.made)
		d.ends, d.own = sized(d.ends, n*len(d.made)), sized(d.own, n)
	}
}

// of returns the finishing ages of a running request; all lie beyond its age.
func (d *draws) of(r *Request) []int32 {
	slot := int(r.Slot)
	if uint(slot) >= uint(len(d.made)) {
		if uint(slot) >= mostSlots {
			d.draw(d.own, r.ID, r.Prompt, r.Key, r.Age)
			return d.own
		}
		d.grow(slot + 1)
	}
	m, ends := &d.made[slot], d.ends[slot*d.n:][:d.n]
	if m.id != r.ID || uint32(r.Age-m.from) >= m.valid {
		m.id = r.ID
		m.from, m.valid = d.draw(ends, r.ID, r.Prompt, r.Key, r.Age)
	}
	return ends
}

// fresh returns the finishing ages of an entry that waits.
func (d *draws) fresh(e *Entry) []int32 {
	d.draw(d.own, e.ID, e.Prompt, e.Key, e.Age)
	return d.own
}

func (d *draws) grow(slots int) {
	made := make([]drawn, slots+slots/2)
	copy(made, d.made)
	ends := make([]int32, len(made)*d.n)
	copy(ends, d.ends)
	d.made, d.ends = made, ends
}

// draw writes the finishing ages and returns for which ages they hold. Draws
// are made at every fourth token; a request that outlived one of them is drawn
// anew where it did.
func (d *draws) draw(ends []int32, id uint64, prompt int32, key uint64, age int32) (from int32, valid uint32) {
	phase := phaseOf(id)
	age = min(max(0, age), 1<<30)
	from = age &^ (redrawEvery - 1)
	blockEnd := from + redrawEvery
	for {
		until := blockEnd
		for z := range ends {
			u := phase + float64(z)/float64(len(ends))
			if u >= 1 {
				u--
			}
			ends[z] = d.end(prompt, key, from, u)
			until = min(until, ends[z])
		}
		if age < until {
			return from, uint32(until - from)
		}
		from = until
	}
}

// end is the age at which a request of this age finishes, at quantile u.
func (d *draws) end(prompt int32, key uint64, age int32, u float64) int32 {
	var left float64
	if d.keyed != nil {
		left = d.keyed.ResidOf(prompt, key, int(age), u)
	} else {
		left = d.outlook.Resid(int(age), u)
	}
	if most := float64(math.MaxInt32 - age); !(left < most) {
		return math.MaxInt32
	}
	return age + max(1, int32(left))
}

// phaseOf is the request's own number in [0, 1): splitmix64's finaliser of its id.
func phaseOf(id uint64) float64 {
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	return float64((id^id>>31)>>11) / (1 << 53)
}

func bitLen(n int32) int { return bits.Len32(uint32(n)) }

// ratios are P(O > age+h | O > age) at the steps of the grid, a row for each age
// once asked for.
type ratios struct {
	steps   []int64
	outlook Outlook
	version uint64
	known   []bool // by age
	rows    []float64
	own     []float64 // of an age beyond the cache
}

// mostAges bounds the cache by age.
const mostAges = 1 << 14

func (r *ratios) resolve(steps []int64, o Outlook) {
	r.outlook = o
	if v := o.Version(); v != r.version || len(steps) != len(r.steps) || r.known == nil {
		r.version = v
		r.known, r.rows, r.own = sized(r.known, mostAges), sized(r.rows, mostAges*len(steps)), sized(r.own, len(steps))
		clear(r.known)
	}
	r.steps = steps
}

func (r *ratios) at(age int32) []float64 {
	n := len(r.steps)
	row := r.own
	if uint(age) < uint(len(r.known)) {
		row = r.rows[int(age)*n:][:n]
		if r.known[age] {
			return row
		}
		r.known[age] = true
	}
	for c, h := range r.steps {
		row[c] = r.outlook.Ratio(int(age), int(h))
	}
	return row
}
