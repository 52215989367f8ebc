package index

// link holds the neighbours of a number in an order; 0: none.
type link struct{ newer, older uint32 }

// order is a doubly linked list of numbers. The caller passes the links, indexed by number.
type order struct{ newest, oldest uint32 }

// push adds a number that is not in the list, as the newest.
func (o *order) push(links []link, n uint32) {
	links[n] = link{older: o.newest}
	if o.newest != 0 {
		links[o.newest].newer = n
	} else {
		o.oldest = n
	}
	o.newest = n
}

func (o *order) remove(links []link, n uint32) {
	l := links[n]
	if l.newer != 0 {
		links[l.newer].older = l.older
	} else {
		o.newest = l.older
	}
	if l.older != 0 {
		links[l.older].newer = l.newer
	} else {
		o.oldest = l.newer
	}
}

// touch makes a number of the list the newest.
func (o *order) touch(links []link, n uint32) {
	if o.newest != n {
		o.remove(links, n)
		o.push(links, n)
	}
}
