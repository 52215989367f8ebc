package gateway

import "slices"

// groups are the names of decode groups, of all engines there are.
func (f *fleet) groups() (names []string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role == roleDecode && !slices.Contains(names, in.conf.Group) {
			names = append(names, in.conf.Group)
		}
	}
	return names
}

// groupUp counts the engines of a decode group, and those that answer.
func (f *fleet) groupUp(name string) (up, all int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role == roleDecode && in.conf.Group == name {
			if all++; in.status.Up {
				up++
			}
		}
	}
	return up, all
}

// boardsOf are the boards with a group's ranks.
func (f *fleet) boardsOf(name string) (boards []string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role != roleDecode || in.conf.Group != name || len(in.status.Models) == 0 {
			continue
		}
		if b := boardOf(in.status.Models); !slices.Contains(boards, b) {
			boards = append(boards, b)
		}
	}
	return boards
}

// owned says whether some decode group with a board's ranks is ours.
func (f *fleet) owned(board string) bool {
	return f.groupWith(board, func(a *decodeGroup) bool { return a.view.Load().Admits })
}

// begins says whether requests may begin here that a board's ranks will decode.
func (f *fleet) begins(board string) bool {
	return f.groupWith(board, func(a *decodeGroup) bool { return a.view.Load().Admits && !a.yields.Load() })
}

// groupWith finds a group of a board's ranks; where this proxy is alone there is
// one.
func (f *fleet) groupWith(board string, is func(*decodeGroup) bool) bool {
	s := f.gw.groups
	if s == nil {
		return true
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role != roleDecode || len(in.status.Models) == 0 || boardOf(in.status.Models) != board {
			continue
		}
		if a := s.of(in.conf.Group); a != nil && is(a) {
			return true
		}
	}
	return false
}
