package gateway

// regionMark stands between a board and its region, where that is not ours.
const regionMark = "@"

// boardIn is where the ranks of another region are while they are ours: KV does
// not cross regions, so what was prefilled there is decoded there.
func boardIn(board, region string) string {
	if region == "" {
		return board
	}
	return board + regionMark + region
}

// abroad is the region of an engine that is another's by its config.
func (f *fleet) abroad(in *instance) string {
	if in.conf.Region == f.gw.conf().Geo.Self.Region {
		return ""
	}
	return in.conf.Region
}

// regionFor is where a hand-off of a prefill engine is decoded, empty for ours.
func (f *fleet) regionFor(prefiller string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[prefiller]; in != nil {
		return f.abroad(in)
	}
	return ""
}

// decodes are the decode engines that answer and are meant, as they are now.
func (f *fleet) decodes(meant func(*instance) bool) (list []*instance) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role == roleDecode && in.status.Up && meant(in) {
			list = append(list, new(*in))
		}
	}
	return list
}
