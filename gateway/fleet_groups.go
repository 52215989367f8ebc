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

// owned says whether some decode group with a board's ranks is ours.
func (f *fleet) owned(board string) bool {
	s := f.gw.groups
	if s == nil {
		return true
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role == roleDecode && len(in.status.Models) > 0 && boardOf(in.status.Models) == board && s.admits(in.conf.Group) {
			return true
		}
	}
	return false
}
